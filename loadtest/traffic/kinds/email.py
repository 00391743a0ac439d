"""Mails to write in English; a thread, notes and a list to work on."""

from __future__ import annotations

from loadtest.traffic.kinds.genre import NUMBERS, Document, Genre

EMAIL = Genre(
    questions=(
        "Write a polite email to $person of $company declining $event on $day $month_name.",
        "Draft a short email asking $person to move $event from $hour:$minute to $day $month_name.",
        "Write a thank-you email to $person and $team after $event at $company, $n sentences.",
        "Remind $person by mail of invoice $code-$big over $other_big euros, due $day $month_name.",
        "Write an apology to $person: parcel $code-$big is $n days late. Offer $remedy.",
        "Draft an email to $team announcing $event on $day $month_name $year, signed by $person.",
        "Make this friendlier: 'Send me the $paper for $event by $day $month_name.' To $person.",
        "Write an out-of-office reply until $day $month_name that names $person of $team.",
        "Reply to $person of $company, who asks for $n licences at $big euros: we offer $remedy.",
        "Write a formal complaint to $company about ticket $code-$big, open for $n days.",
    ),
    documents=(
        Document(
            "Draft a reply to the last mail of this thread about $event. Be brief and friendly.\n",
            (
                "\nFrom: $person\nSent: $day $month_name, $hour:$minute\n\nThe $paper for $event "
                "is $status. $team would need $n more days; can $person_two confirm?\n",
                "\nFrom: $person_two ($company)\nSent: $day $month_name, $hour:$minute\n\n"
                "Thank you. We counted $big units, not $other_big. Could you offer $remedy?\n",
                "\nFrom: $person\nSent: $day $month_name, $hour:$minute\n\nI spoke to $team. "
                "Their worry is that $worry. Shall we meet at $hour:$n in room $m?\n",
                "\nFrom: $person_two\nSent: $day $month_name, $hour:$minute\n\nOne question on "
                "the $paper: page $n says that $worry. Is that still so, $person?\n",
            ),
            kept=("event", "company"),
        ),
        Document(
            "Turn these notes of $event into an email to $team, with a list of who does what until "
            "when.\n\n",
            (
                "- $person: the $paper is $status; $n % done, rest by $day $month_name\n",
                "- $person fears that $worry ($code-$big)\n",
                "- agreed: $company gets $remedy, about $big euros; $person writes to them\n",
                "- open: who talks to $company about $n of the $m samples?\n",
            ),
        ),
        Document(
            "| invoice | customer | euros | due | contact |\n| --- | --- | --- | --- | --- |\n",
            ("| $code-$big | $company | $other_big.$cents | $day $month_name | $person |\n",),
            "\nWrite a reminder to the customer who owes us most, and offer $remedy.\n",
        ),
    ),
    words={
        **NUMBERS,
        "person": (
            "Ms Weber", "Professor Lin", "Mr Okafor", "Dr Novak", "Mrs Tanaka", "Anna Schmidt",
            "Luca Rossi", "Mr Haddad", "Priya Nair", "Tom Becker", "Ms Jansen", "Elena Petrova",
            "Mr Silva", "Grace Kim", "Dr Moreau", "Sam Walker", "Ines Costa", "Mr Lindqvist",
            "Maya Cohen", "Jonas Vogel",
        ),
        "person_two": (
            "Olga Marin", "Mr Fischer", "Chloe Dubois", "Ravi Menon", "Ms Andersen", "Paul Meyer",
            "Nadia Karim", "Mr Brooks", "Hanna Virtanen", "Diego Ruiz",
        ),
        "company": (
            "Nordlicht Energy", "Harbour Foods", "Blue Finch Media", "Castell Tools", "Oakline",
            "Veridia Labs", "Morgen Logistics", "Tessera Glass", "Kestrel Air", "Lumen Books",
            "Granite Insurance", "Silverbrook", "Pallas Systems", "Fenwick Dairy", "Solano Bikes",
        ),
        "event": (
            "the quarterly review", "the product launch", "the interview", "the safety workshop",
            "the board dinner", "the trade fair", "the site visit", "the budget meeting",
            "the summer party", "the audit", "the supplier day", "the training",
        ),
        "team": (
            "the sales team", "the finance team", "all staff", "the warehouse", "the support desk",
            "the legal team", "our engineers", "the works council", "the design group",
        ),
        "paper": (
            "agenda", "contract", "price list", "test report", "forecast", "floor plan", "budget",
            "slide deck", "delivery note", "risk list",
        ),
        "status": (
            "almost ready", "late", "with the lawyers", "signed", "under review", "out of date",
            "missing two pages", "approved",
        ),
        "worry": (
            "the supplier cannot deliver in time", "the costs were counted twice",
            "nobody has tested the new version", "the room is too small",
            "the customer expects a discount", "the figures are from last year",
            "two of us are on leave that week", "the permit has not arrived",
        ),
        "remedy": (
            "a refund", "a discount of ten percent", "free delivery", "a new date",
            "a longer trial", "a replacement", "payment in instalments",
            "a visit by our technician",
        ),
        "month_name": (
            "January", "February", "March", "April", "May", "June", "July", "August", "September",
            "October", "November", "December",
        ),
    },
)  # fmt: skip
