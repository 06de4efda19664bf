"""Wire formats of all-gathers, and collectives by an object of the user: transports."""
