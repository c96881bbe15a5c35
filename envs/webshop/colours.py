"""WebShop's colour words: the first one in alphabetical order that a text contains, also within another word."""

from __future__ import annotations

_WORDS = """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream
    crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather
    indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha
    multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal
    rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise
    violet walnut wheat white wine yellow
"""
COLOURS = tuple(_WORDS.split())


def normalise_colour(text: str) -> str:
    """Return the first colour word that is a part of `text`, or else the text.

    >>> [normalise_colour(text) for text in ("titanium", "dark red", "dark blue", "xl")]
    ['tan', 'dark', 'blue', 'xl']
    """
    return next((colour for colour in COLOURS if colour in text), text)
