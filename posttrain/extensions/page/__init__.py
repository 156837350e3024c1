"""The commands `report` (page of recorded runs) and `inspect` (rows of a dataset)."""
