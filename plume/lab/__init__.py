"""The experiments of the papers in small: variants of one recipe, claims about them, and what came of them here."""
