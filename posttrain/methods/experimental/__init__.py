"""Methods whose place in practice is not proven; nothing outside this room knows them."""
