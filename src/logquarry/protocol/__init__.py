"""Network protocols without sockets: bytes in, events and bytes out."""
