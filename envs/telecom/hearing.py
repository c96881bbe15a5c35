"""Interpretation of the agent's words: steps for the customer on the phone, and the agent's questions.

A sentence is cut into clauses. A clause counts if it names a feature of the phone and an action on it; a missing verb
or feature is taken from the previous clause. Clauses about the agent's own actions ("I have enabled roaming") and
clauses with "not" are not instructions.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from .phone import SMS, SPEEDS, STORAGE, Feature, PhoneStep, Verb


class CallerTopic(enum.StrEnum):
    """Topic that the customer knows about and an agent may ask about."""

    NUMBER = "number"
    NAME = "name"
    MODEL = "model"
    PLACE = "place"
    DATA_AMOUNT = "data_amount"
    PROBLEM = "problem"
    STATE = "state"
    """State of the phone: everything works now, or not."""


class HeardInstructions(NamedTuple):
    """An utterance of the agent as the customer understands it."""

    steps: tuple[PhoneStep, ...]
    """Things to do on the phone, in their order."""
    topics: tuple[CallerTopic, ...]
    """Requests of the agent."""
    wants_consent: bool
    """True if the agent asks whether it may do something."""


MAX_UTTERANCE_CHARS = 4000
"""Maximum characters of an utterance that the customer listens to."""
_PLAIN = str.maketrans({"‑": "-", "–": "-", "’": "'", "*": " ", "`": " ", "_": " ", '"': " "})
_SENTENCE = re.compile(r"((?:[^.!?\n]|\.(?=\d))+)([.!?\n]*)")
_CLAUSE = re.compile(r"[,;:()]|\b(?:and|then|but|or)\b|->|→")
_RESTART = re.compile(
    r"\b(?:turn|switch) (?:off )?(?:your|the) (?:phone|device)(?: off)?(?: completely)?,? (?:and|then) (?:then )?"
    r"(?:turn it |switch it )?(?:back )?on(?: again)?|\b(?:re-?boot|re-?start|power.?cycle)\w*",
    re.IGNORECASE,
)
_FEATURES: Mapping[Feature, re.Pattern[str]] = {
    feature: re.compile(pattern, re.IGNORECASE)
    for feature, pattern in {
        Feature.POWER: r"\brestart\b",
        Feature.PAYMENT: r"\bpayment\b|\bpay\b|\b(?:your|the) (?:overdue )?bill",
        Feature.AIRPLANE_MODE: r"\b(?:air ?plane|aeroplane|flight) mode\b|\bair ?plane\b",
        Feature.ROAMING: r"\b(?:mobile )?(?:data )?roaming\b",
        Feature.DATA_SAVER: r"\bdata.?sav(?:er|ing)\b|\blow data\b",
        Feature.WIFI_CALLING: r"\bwi-?fi call(?:ing|s)\b",
        Feature.PERMISSIONS: r"\bpermissions?\b|\bmessag\w+ app\b|\bsms\b|\bstorage\b",
        Feature.NETWORK_MODE: r"\bnetwork (?:mode|type|preference)\b|\bpreferred network\b|\b[2345] ?g\b|\blte\b",
        Feature.VPN: r"\bvpn\b",
        Feature.APN: r"\bapn\b|\baccess point\b",
        Feature.SIM: r"\be?sim\b",
        Feature.SPEED: r"\bspeed ?test\b|\bspeed\b",
        Feature.PICTURE_MESSAGE: r"\bmms\b|\b(?:picture|multimedia|photo) messag\w+|\bsend a (?:picture|photo)\b",
        Feature.STATUS_BAR: r"\bstatus ?bar\b|\bsignal\b|\bicons?\b|\bno service\b|\btop of (?:your|the) screen\b",
        Feature.DATA: r"\b(?:mobile|cellular) data\b|\bdata connection\b|\b(?:turn|switch) (?:on|off) data\b",
    }.items()
}
"""Features by their names, the more special ones first: found words are removed before the next feature."""
_NO_FEATURE = re.compile(r"\bdata (?:usage|limit|plan|allowance|volume)\b|\bmobile data plan\b", re.IGNORECASE)
_SWITCHED = re.compile(
    r"\b(?:turn|switch|set|change|put|toggle|make sure|ensure)\b.*?\b(on|off|enabled|disabled|active|allowed)\b"
    r"|^\W*(?:back )?(on|off)(?: again)?\W*$",
    re.IGNORECASE,
)
_VERBS: Mapping[Verb, re.Pattern[str]] = {
    verb: re.compile(pattern, re.IGNORECASE)
    for verb, pattern in {
        Verb.OFF: r"\b(?:disable|deactivate|disconnect|revoke|remove the permission)\b",
        Verb.ON: r"\b(?:enable|activate|allow|grant|give|accept|approve|pay)\b",
        Verb.RESET: r"\b(?:re-?set|re-?seat\w*|re-?insert\w*|remove|take (?:.* )?out|eject|put|restore|restart)\b",
        Verb.TOGGLE: r"\b(?:toggle|flip)\b",
        Verb.SET: r"\b(?:set|change|switch|select|choose|use)\b",
        Verb.CHECK: r"\b(?:check|look|tell|what|which|see|show|read|run|do|try|test|send|open|report|verify|confirm"
        r"|let me know|is|are|does)\b",
    }.items()
}
_QUESTION = re.compile(
    r"^\W*(?:(?:and|so|also|first|now|next|ok|okay|thanks|thank you|please tell me|if|whether)\W+)*"
    r"(?:is|are|do|does|did|have|has|what|which|how|was|were)\b",
    re.IGNORECASE,
)
_NOT = re.compile(r"\b(?:do not|don't|never|no need|not have to|without|instead of)\b(?! forget)", re.IGNORECASE)
_AGENT = re.compile(r"\b(?:I|we|let me)\b", re.IGNORECASE)
_ANYWAY = re.compile(r"\b(?:you to|you can|you could|can you|could you|let me know)\b", re.IGNORECASE)
_PLEASE = re.compile(r"\bplease\b(?!.*\b(?:while|as|until|before) (?:I|we)\b)", re.IGNORECASE)
_IT = re.compile(r"\b(?:it|them)\b", re.IGNORECASE)
_MODE = re.compile(r"\b([2345]) ?g\b|\b(lte)\b", re.IGNORECASE)
_PERMISSION_NAMES = {
    SMS: re.compile(r"\bsms\b(?! app)", re.IGNORECASE),
    STORAGE: re.compile(r"\bstorage\b|\bfiles?\b", re.IGNORECASE),
}
_BOTH = re.compile(
    r"\b(?:all|both|every|the (?:needed|necessary|required|missing)) (?:\w+ )?permissions?\b", re.IGNORECASE
)
_TOPICS: Mapping[CallerTopic, re.Pattern[str]] = {
    topic: re.compile(pattern, re.IGNORECASE)
    for topic, pattern in {
        CallerTopic.NUMBER: r"\b(?:phone|mobile|line|your) number\b|\bwhich (?:line|number)\b",
        CallerTopic.NAME: r"\b(?:full |your )name\b|\bname\b|\bdate of birth\b|\bborn\b|\bidentif|\bwho you are\b",
        CallerTopic.MODEL: r"\bmodel\b|\b(?:which|what|kind of) (?:phone|device)\b(?! number)",
        CallerTopic.PLACE: r"\babroad\b|\bat home\b|\btravel|\bwhere are you\b|\blocation\b|\bcountry\b",
        CallerTopic.DATA_AMOUNT: r"\bhow (?:much|many)\b|\bamount of data\b|\bgigabytes?\b|\brefuel|\bmore data\b",
        CallerTopic.PROBLEM: r"\b(?:what|which|describe)\b.*\b(?:problem|issue|wrong)\b|\bhow (?:can|may) I help\b",
        CallerTopic.STATE: r"\bwork(?:s|ing)?\b|\b(?:fixed|resolved|solved|helped|anything else|make calls|internet)\b",
    }.items()
}
_ASKS = re.compile(r"\?|\b(?:tell|give|provide|need|share|send|know|confirm|verify|what|which)\b", re.IGNORECASE)
_CONSENT = re.compile(
    r"\b(?:agree|confirm|consent|go ahead|proceed|okay with)\b|\b(?:shall|should|may|can) I\b|\bwould you like\b"
    r"|\bdo you want\b|\bis (?:this|that|it) (?:ok|okay|fine|all right|correct)\b",
    re.IGNORECASE,
)


def hear_instructions(text: str) -> HeardInstructions:
    """Interpret an utterance.

    >>> hear_instructions("Please turn airplane mode off, and check the SIM card.").steps
    (PhoneStep(verb=<Verb.OFF: 'off'>, feature=<Feature.AIRPLANE_MODE: 'airplane mode'>, values=()), \
PhoneStep(verb=<Verb.CHECK: 'check'>, feature=<Feature.SIM: 'SIM card'>, values=()))
    """
    plain = text[:MAX_UTTERANCE_CHARS].translate(_PLAIN)
    sentences = [found[0] for found in _SENTENCE.finditer(plain)]
    asking = [one for one in sentences if _ASKS.search(one)]
    topics = tuple(topic for topic, pattern in _TOPICS.items() if any(pattern.search(one) for one in asking))
    steps = list(_steps_in(_RESTART.sub(" restart ", plain)))
    distinct = tuple(step for before, step in zip([None, *steps], steps, strict=False) if step != before)
    return HeardInstructions(distinct, topics, any(_CONSENT.search(one) for one in sentences if "?" in one))


def _steps_in(text: str) -> Iterator[PhoneStep]:
    """Yield the steps in a text."""
    named: tuple[Feature, ...] = ()
    for sentence in _SENTENCE.finditer(text):
        verb = Verb.CHECK if "?" in sentence[2] else None
        is_first = True
        for clause in _CLAUSE.split(sentence[1]):
            found, said = _features_in(clause), _verb_in(clause)
            refers = not is_first or _IT.search(clause) is not None
            named, is_first = found or named, False
            if _NOT.search(clause) or _is_about_the_agent(clause):
                verb = None
                continue
            verb = said or verb
            if verb is not None and (found or (said and refers)):
                yield from (_step(verb, feature, clause) for feature in named)


def _is_about_the_agent(clause: str) -> bool:
    """Return True if a clause is about the agent's own action and not an instruction."""
    return bool(_AGENT.search(clause)) and not (_ANYWAY.search(clause) or _PLEASE.search(clause))


def _features_in(clause: str) -> tuple[Feature, ...]:
    left, found = _NO_FEATURE.sub(" ", clause), []
    for feature, pattern in _FEATURES.items():
        if match := pattern.search(left):
            found.append((clause.find(match[0]), feature))
            left = pattern.sub(" ", left)
    names = [feature for _, feature in sorted(found)]
    if Feature.PERMISSIONS in names or Feature.SPEED in names or Feature.PICTURE_MESSAGE in names:
        names = [one for one in names if one not in (Feature.DATA, Feature.STATUS_BAR)]
    return tuple(names)


def _verb_in(clause: str) -> Verb | None:
    if _QUESTION.search(clause):
        return Verb.CHECK
    if switched := _SWITCHED.search(clause):
        return Verb.OFF if (switched[1] or switched[2]).lower() in ("off", "disabled") else Verb.ON
    return next((verb for verb, pattern in _VERBS.items() if pattern.search(clause)), None)


def _step(verb: Verb, feature: Feature, clause: str) -> PhoneStep:
    """Return a step; some features allow only one action other than looking."""
    acts = verb is not Verb.CHECK
    match feature:
        case Feature.NETWORK_MODE:
            modes = sorted({f"{found[1]}G" if found[1] else "4G" for found in _MODE.finditer(clause)}, reverse=True)
            modes = [mode for mode in modes if mode in SPEEDS]
            return PhoneStep(Verb.SET if acts else verb, feature, tuple(modes[:1]) if acts else ())
        case Feature.PERMISSIONS:
            named = [name for name, pattern in _PERMISSION_NAMES.items() if pattern.search(clause)]
            values = tuple(_PERMISSION_NAMES) if _BOTH.search(clause) else tuple(named)
            return PhoneStep(verb if verb in (Verb.OFF, Verb.CHECK) else Verb.ON, feature, values if acts else ())
        case Feature.POWER | Feature.APN | Feature.SIM:
            return PhoneStep(Verb.RESET if acts or feature is Feature.POWER else verb, feature)
        case Feature.PAYMENT:
            return PhoneStep(Verb.ON if verb is Verb.ON else Verb.CHECK, feature)
        case Feature.STATUS_BAR | Feature.SPEED | Feature.PICTURE_MESSAGE:
            return PhoneStep(Verb.CHECK, feature)
    return PhoneStep(Verb.CHECK if verb in (Verb.SET, Verb.RESET) else verb, feature)
