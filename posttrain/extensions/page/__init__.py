"""The report page of recorded runs and the inspection of rows, and their commands `report` and `inspect`."""
