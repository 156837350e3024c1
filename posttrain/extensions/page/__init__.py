"""The commands `report`, which writes a page about recorded runs, and `inspect`, which shows the rows of a dataset."""
