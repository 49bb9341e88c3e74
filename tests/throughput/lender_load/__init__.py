"""What readers cost a lender, measured."""
