"""What goes wrong in a cluster, done to real threads, sockets and bytes."""
