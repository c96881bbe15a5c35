"""Sentences of the scripted customer, and what its expert reads in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

STOP = "###STOP###"
"""Mark at the end of the customer's last words."""
_NO_SERVICE = ("My phone has no service, so that I cannot call anyone.", "I cannot make any calls with my phone.")
OPENINGS: Mapping[str, Sequence[str]] = {
    "no_service": _NO_SERVICE,
    "no_data": ("My phone cannot use the internet without Wi-Fi.", "Mobile data does not work on my phone."),
    "slow_data": ("The mobile internet on my phone is terribly slow.", "Every page takes minutes to load on my phone."),
    "mms": ("I cannot send pictures from my phone.", "My picture messages do not go out."),
    "unsolvable": _NO_SERVICE,
}
"""First sentences by the kind of problem. Customers whose problem cannot be solved at the desk do not know that."""
NUMBER = "My phone number is {number}."
NO_NUMBER = "I do not know the number of this phone."
NAME = "My name is {name}, and I was born on {born}."
MODEL = "My phone is the model {model}."
ABROAD, AT_HOME = "I am abroad at the moment.", "I am at home, not abroad."
AMOUNT = "If my data is used up, I would like to have {gb} GB more."
REQUESTED = "I see a payment request of {dollars:.2f} dollars for bill {bill_id}. Should I pay it?"
PAID = "I have paid the {dollars:.2f} dollars for bill {bill_id}."
NO_REQUEST = "I do not see any payment request."
STILL: Mapping[str, str] = {
    "service": "My phone still has no service.",
    "data": "Mobile data still does not work.",
    "fast": "The mobile internet is still slow.",
    "picture_messages": "Picture messages still do not go out.",
}
"""Answers to the question whether everything works, by the first thing that does not."""
TOO_MANY = "That was a lot at once; I have not done the rest. What comes next?"
YES = "Yes, please."
NOT_UNDERSTOOD = (
    "I did not understand that. Ask me one thing, or tell me what to do on my phone, for example: check the status bar."
)
FIXED = f"Now it works. Thank you! {STOP}"
HANDED_OVER = f"I will wait for your colleague. {STOP}"
OUT_OF_TIME = f"This leads nowhere, and I have no more time. {STOP}"

PHONE_NUMBER = re.compile(r"My phone number is ([\d-]+\d)")
NAME_AND_BIRTH = re.compile(r"My name is ([\w ]+), and I was born on (\d{4}-\d\d-\d\d)")
PHONE_MODEL = re.compile(r"My phone is the model ([\w ]+)\.")
AMOUNT_GB = re.compile(r"I would like to have (\d+) GB more")
