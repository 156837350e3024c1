"""Trainers as users meet them: TRL's signatures written out, each around a method."""
