"""A process in, the same process confined out: levels, backends, and what each of them is proved to do here."""
