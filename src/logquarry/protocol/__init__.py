"""Network protocols without sockets: the caller passes received bytes in, and gets events and the
bytes to send.
"""
