"""Helpers by TRL's names that our own trainers do not use: imported when a user asks for one, and by nothing else here."""
