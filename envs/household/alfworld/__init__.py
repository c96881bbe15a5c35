"""ALFWorld's own games: game files of the original, in the household engine or in the original itself."""
