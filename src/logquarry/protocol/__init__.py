"""What goes over wires, as machines without sockets: bytes in, events out."""
