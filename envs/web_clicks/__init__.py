"""Tasks on web pages: a screenshot of a page in Chromium in, a click out."""
