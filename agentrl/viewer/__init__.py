"""Local web server that shows runs and evaluations, episode by episode and token by token, while they are written."""
