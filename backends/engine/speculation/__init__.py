"""Drafts: who proposes them, how many are worth a step's time, and what became of them."""
