"""What the router costs a request, beside asking its engines directly; see ``__main__``."""
