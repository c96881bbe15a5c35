"""Porter's stemmer as in Lucene: the algorithm of 1980 with its author's later rules for "bli" and "logi".

M. F. Porter, An algorithm for suffix stripping, Program 14(3), 1980. The tests compare it with another implementation.
"""

from __future__ import annotations

_STEP_2 = {
    "ational": "ate",
    "tional": "tion",
    "enci": "ence",
    "anci": "ance",
    "izer": "ize",
    "bli": "ble",
    "alli": "al",
    "entli": "ent",
    "eli": "e",
    "ousli": "ous",
    "ization": "ize",
    "ation": "ate",
    "ator": "ate",
    "alism": "al",
    "iveness": "ive",
    "fulness": "ful",
    "ousness": "ous",
    "aliti": "al",
    "iviti": "ive",
    "biliti": "ble",
    "logi": "log",
}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_ENDINGS = "ement ance ence able ible ment ant ent ion ism ate iti ous ive ize al er ic ou"
_STEP_4 = tuple(_ENDINGS.split())


def stem(word: str) -> str:
    """Return the stem of a word in lower case.

    >>> [stem(word) for word in ("relational", "hopping", "skies", "moisturizing", "oils", "as")]
    ['relat', 'hop', 'ski', 'moistur', 'oil', 'as']
    """
    if len(word) <= 2:
        return word
    for step in (_plural, _past, _final_y, _double_suffix, _suffix, _last_suffix, _final_e, _double_l):
        word = step(word)
    return word


def _is_consonant(word: str, place: int) -> bool:
    if word[place] == "y":
        return place == 0 or not _is_consonant(word, place - 1)
    return word[place] not in "aeiou"


def _shape(part: str) -> str:
    """Return a word's consonants as "c" and its vowels as "v"."""
    shape = ""
    for letter in part:
        vowel = letter in "aeiou" or (letter == "y" and shape[-1:] == "c")
        shape += "v" if vowel else "c"
    return shape


def _measure(part: str) -> int:
    """Count the vowels that a consonant follows."""
    return _shape(part).count("vc")


def _ends_in_short_syllable(word: str) -> bool:
    """Return True if a word ends with consonant, vowel, consonant, the last one not w, x or y."""
    return len(word) > 2 and _shape(word).endswith("cvc") and word[-1] not in "wxy"


def _ends_in_double_consonant(word: str) -> bool:
    return len(word) > 1 and word[-1] == word[-2] and _is_consonant(word, len(word) - 1)


def _plural(word: str) -> str:
    if word.endswith(("sses", "ies")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    suffix = next((suffix for suffix in ("ed", "ing") if word.endswith(suffix)), None)
    if suffix is None or "v" not in _shape(word.removesuffix(suffix)):
        return word
    word = word.removesuffix(suffix)
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if _ends_in_double_consonant(word) and word[-1] not in "lsz":
        return word[:-1]
    return word + "e" if _measure(word) == 1 and _ends_in_short_syllable(word) else word


def _final_y(word: str) -> str:
    return word[:-1] + "i" if word.endswith("y") and "v" in _shape(word[:-1]) else word


def _replace_longest(word: str, endings: dict[str, str]) -> str:
    """Replace the longest matching ending if the part before it is long enough."""
    for length in range(min(7, len(word) - 1), 2, -1):
        replacement = endings.get(word[-length:])
        if replacement is not None:
            return word[:-length] + replacement if _measure(word[:-length]) > 0 else word
    return word


def _double_suffix(word: str) -> str:
    return _replace_longest(word, _STEP_2)


def _suffix(word: str) -> str:
    return _replace_longest(word, _STEP_3)


def _last_suffix(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            part = word.removesuffix(suffix)
            if suffix == "ion" and part[-1:] not in ("s", "t"):
                return word
            return part if _measure(part) > 1 else word
    return word


def _final_e(word: str) -> str:
    if not word.endswith("e"):
        return word
    measure = _measure(word[:-1])
    return word[:-1] if measure > 1 or (measure == 1 and not _ends_in_short_syllable(word[:-1])) else word


def _double_l(word: str) -> str:
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word
