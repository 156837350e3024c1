"""Optional parts of posttrain. The other packages do not import them; their commands are entry points (`posttrain.plugins`)."""
