"""ALFWorld's own games: game files of the original, played in the household engine or in the original."""
