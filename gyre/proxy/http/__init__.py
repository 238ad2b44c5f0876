"""The proxy's HTTP side: sockets, routes and answers."""
