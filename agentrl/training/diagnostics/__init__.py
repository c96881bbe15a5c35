"""The watch over a training's numbers: norms by group, alarms, updates left out and how to repeat them."""
