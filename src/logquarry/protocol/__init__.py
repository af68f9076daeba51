"""Network protocols without sockets: the caller passes bytes, and gets events and bytes to send."""
