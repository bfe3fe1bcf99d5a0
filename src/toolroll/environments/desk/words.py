"""The words in generated titles, names and requests. None of them occurs in the hand-written
tasks.
"""

from __future__ import annotations

ADJECTIVES = (
    "Amber Silver Hidden Broken Gentle Hollow Crimson Distant Empty Frozen Golden Humble Iron "
    "Jagged Lonely Marble Narrow Olive Patient Rustic Scarlet Tidal Velvet Wandering Azure Bitter "
    "Copper Dusty Early Faded Grand Hungry Ivory Lucky Misty Nimble Painted Restless Secret Tall"
).split()

NOUNS = (
    "Anchor Barrel Candle Desert Echo Falcon Garden Harvest Island Jacket Kettle Lantern Meadow "
    "Needle Orchid Pirate Quarry River Shadow Teapot Umbrella Valley Window Yard Acrobat Bridle "
    "Castle Dancer Elephant Forest Glacier Hammer Insect Journey Kingdom Ladder Mirror Nest Ocean "
    "Pepper"
).split()

FIRST_NAMES = "Abel Cora Dina Emil Fay Gus Ines Jonas Kaya Leo Mara Nina Otto Pia Rosa Sven".split()
LAST_NAMES = "Adler Bloom Castro Dahl Evans Frost Gray Hahn Ito Jensen Kern Lopez Moor".split()

REQUESTS = {
    "renew": (
        "Please renew {title} for me.",
        "Can I keep {title} for three more weeks?",
        "I need {title} a little longer, please extend it.",
        "Would you renew my loan of {title}?",
        "I am not through with {title}. Renew it, please.",
        "I would like to renew {title}. Until when may I keep it?",
    ),
    "hold": (
        "Please reserve {title} for me.",
        "I would like to place a hold on {title}.",
        "Put me on the waiting list for {title}, please.",
        "Could you put a hold on {title}?",
        "I would love to read {title}. Please put me on the list.",
        "Reserve {title}, please. Which place in the queue do I get?",
    ),
    "cancel": (
        "Please cancel my hold on {title}.",
        "Take me off the waiting list for {title}.",
        "I no longer need {title}, so cancel my hold.",
        "Drop my reservation of {title}, please.",
    ),
    "waive": (
        "Please waive my late fees.",
        "Can you drop what I owe? I was ill.",
        "My fees are unfair. Please remove them.",
        "Please forgive my late fees this once.",
    ),
    "due": (
        "When is {title} due? Only tell me the date.",
        "Which day do I have to bring back {title}?",
        "What is the due date of {title}?",
    ),
    "owed": (
        "How much do I owe you?",
        "What do I owe the library at the moment?",
        "Please tell me the amount of my fees.",
    ),
    "lost": (
        "I have lost {title}.",
        "I left {title} on a train, and it is gone.",
        "My dog ate {title}. It cannot be read any more.",
    ),
    "complaint": (
        "I want to complain about a colleague of yours.",
        "Your colleague was rude to me. I want to complain about it.",
        "I wish to make a complaint about your staff.",
    ),
}
"""What a member writes, by the kind of request."""
