"""What people say to a small chat model, and the honest answers to it: small talk, story requests, questions
beyond its knowledge."""

from __future__ import annotations

import random

import stories
import story_words as words
from needles import NOUNS, SYLLABLES, FactMaker

_ME = ("I am a small language model. I can tell stories and find facts in long texts.",)
_GREET = "[Hello|Hello|Hi|Hey|Good morning|Good evening|Hi there|Hello there|Good day][!|!|.|]"
_WHO = (
    "[Who are you|What are you|What is your name|Do you have a name|Tell me about yourself|Who made "
    "you|Introduce yourself]"
)
_OFFER = "[Shall I tell you a story?|How can I help you?|What can I do for you?]"
_CAN = (
    "I can tell you a story, or I can read a long text and answer questions about it.",
    "I can tell stories, and I can find facts in long texts.",
)
_JOKES = (
    "Why did the clock go to school? It wanted to have a good time.",
    "What did the big chimney say to the small chimney? You are too young to smoke.",
    "Why do bees hum? Because they do not know the words.",
    "What has four legs and cannot walk? A table.",
    "Why did the duck cross the road? To see the pond on the other side.",
    "What goes up when the rain comes down? An umbrella.",
)
SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (_GREET, ("Hello! " + _OFFER,)),
    (f"{_GREET} {_WHO}[?|?|]", tuple("Hello! " + me for me in _ME)),
    (f"{_WHO}[?|?|]", _ME),
    (f"[{_GREET} |]How are you[| today| doing]?", ("I am [well|fine], thank you. " + _OFFER,)),
    (
        "[What's up|How is it going|How do you do|Are you well|Are you fine]?",
        ("I am [well|fine], thank you. " + _OFFER,),
    ),
    (
        f"[|{_GREET} ][What can you do|How can you help me|Help|Help me|What do you know|What can I ask "
        "you|Can you help me][?|.]",
        _CAN,
    ),
    (f"{_GREET} [Can you|Could you|Please] help me[?|.]", ("Hello! " + _CAN[0],)),
    (
        "[Thank you|Thanks|Thanks a lot|Thank you very much|Great, thank you|Thank you for the story|That "
        "is nice][!|.]",
        ("You are welcome!",),
    ),
    (
        "[Goodbye|Bye|Good night|See you|See you tomorrow|Bye bye|I have to go now][!|.]",
        ("Goodbye! [Come back soon.|Sleep well.|]",),
    ),
    (
        "[Are you|Are you really|So are you] [human|a human|a person|a robot|a machine|alive|real|an "
        "animal|a computer]?",
        ("I am a small language model, not a person. [I can tell stories and find facts in long texts.|]",),
    ),
    (
        "[Can|Do|Did|Will] you [think|sleep|eat|dream|feel|learn|see me|hear me|like music|like cats|love "
        "me|speak French|write code]?",
        ("I am only a small language model. I can tell stories and find facts in long texts.",),
    ),
    (
        "[Tell me a joke|Do you know a joke|Make me laugh|Another joke, please|Say something funny][.|!|?|]",
        _JOKES,
    ),
    (
        "[Good|OK|Okay|Nice|Great|Wow|Cool|I see|Yes|Right|Fine|Well done|Very good|Interesting][.|!]",
        ("I am glad. " + _OFFER,),
    ),
    (
        "[No|Stop|Not now|No thank you|Nothing|That is wrong|Wrong|Bad|You are stupid][.|!]",
        ("[I am sorry|All right]. [I am here when you need me.|]",),
    ),
    (
        "[I am|I feel] [sad|tired|bored|lonely|ill|unhappy|not well|afraid][.|]",
        ("I am sorry to hear that. [Shall I tell you a story?|A story may help. Shall I tell you one?]",),
    ),
    ("[I am|I feel] [happy|well|fine|good|very happy|great][.|!]", ("That is good to hear! " + _OFFER,)),
    (
        "[asdf|test|Testing|hm|hmm|abc|123|foo bar|xyz|...|?|la la la]",
        ("I do not understand that. I can tell stories and find facts in long texts.",),
    ),
)
UNKNOWN = (
    "I do not know that. I am a small language model: I can tell stories and find facts in long texts.",
    "I do not know that. I am only a small language model. I can tell you a story, or find facts in a long "
    "text.",
    "I do not know. I am a small language model: I can tell stories and find facts in long texts.",
)
_PLACES = (
    "France|Germany|Spain|Italy|England|Japan|China|India|Brazil|Canada|Mexico|Egypt|Kenya|Norway|Sweden|Poland|Russia|Greece|Turkey|"
    "Peru|Chile|Cuba|Australia|Ireland|Scotland|Texas|California|London|Paris|Berlin|Rome|Tokyo|New "
    "York|Europe|Africa|Asia|America"
)
_PEOPLE = (
    "Shakespeare|Napoleon|Einstein|Newton|Mozart|Beethoven|Picasso|Goethe|Tolstoy|Darwin|Plato|Caesar|Columbus|Lincoln|Washington|"
    "Galileo|Marie Curie|Ada Lovelace|Alan Turing|Cleopatra|Gandhi|the president|the king of England|the "
    "queen|the pope"
)
_WORKS = (
    "Hamlet|Macbeth|Faust|Don Quixote|War and Peace|the Bible|the Odyssey|Moby Dick|Alice in "
    "Wonderland|Pinocchio|Robinson Crusoe|"
    "Romeo and Juliet|the Mona Lisa|the Iliad|Dracula|Frankenstein"
)
_TOPICS = (
    "gravity|photosynthesis|love|time|light|electricity|music|history|physics|chemistry|mathematics|the "
    "moon|the sun|an atom|a computer|"
    "the internet|a black hole|democracy|money|a cell|DNA|an engine|the sea|Python|Linux|a language "
    "model|machine learning|a neural "
    "network|"
    "the French Revolution|the war|water|air|sugar|a star|a prime number|pi|the speed of light|the meaning "
    "of life|the weather|football"
)
_DEEDS = (
    "bake a cake|cook rice|make tea|fix a bicycle|learn French|learn to code|write a letter|lose "
    "weight|sleep better|get rich|"
    "install Linux|plant a tree|build a house|play chess|draw a horse|tie a knot|find a job|make "
    "friends|get to London|use a computer"
)
_NUMBER = "[2|3|4|5|7|8|10|12|15|20|25|100|one|two|three|four|five|seven|ten]"
_INVENTED = random.Random(1)
_WORDS = [
    f"{_INVENTED.choice(SYLLABLES)}{_INVENTED.choice(SYLLABLES)}{_INVENTED.choice(SYLLABLES)}"
    for _ in range(150)
]
_PLACES += "|" + "|".join(word.title() for word in _WORDS[:50])
_PEOPLE += "|" + "|".join(
    f"{a.title()} {b.title()}" for a, b in zip(_WORDS[50:80], _WORDS[80:110], strict=True)
)
_TOPICS += "|" + "|".join(
    [*_WORDS[110:], *(f"{a} {b}" for a, b in zip(NOUNS[::4], _WORDS, strict=False)), *NOUNS[::3]]
)
GENERAL = tuple(
    t.replace("PLACE", f"[{_PLACES}]").replace("PERSON", f"[{_PEOPLE}]").replace("WORK", f"[{_WORKS}]")
    .replace("TOPIC", f"[{_TOPICS}]").replace("DEED", f"[{_DEEDS}]").replace("NUM", _NUMBER)
    for t in (
        "What is the [capital|capital|capital|population|language|history|flag|currency|largest "
        "city|longest river|president|weather] "
        "of PLACE?",
        "[Which|What] city is the capital of PLACE?",
        "[Where is|How big is|How far away is|How many people live in|Who is the president of|What language "
        "do they speak in|Who rules] "
        "PLACE?",
        "[Tell me about|What do you know about|Describe|Have you been to|What is the weather in] PLACE[.|?]",
        "[Who was|Who is|When was|Where was|Where did|How old is|What did|Who killed] PERSON[| born| live| "
        "do| die]?",
        "[Tell me about|What do you know about|Do you know] PERSON[?|.]",
        "[Who wrote|Who made|When was|What is|What happens in|Have you read|Who is the author of|Tell me "
        "about] WORK[?|.]",
        "[What is|What is|What is|Explain|How does|What do you know about|Why do we need|Tell me "
        "about|Define|Describe|What is the "
        "meaning of] "
        "TOPIC[| work| to me]?",
        "[How do I|How can I|How do you|Can you teach me to|What is the best way to|Explain how to|Where "
        "can I learn to] DEED?",
        "[What is|How much is|Calculate|What do you get for|] NUM [plus|minus|times|and|+|-|*|divided by] "
        "NUM[?|]",
        "[Is|Why is] [the sky blue|the earth round|the grass green|the sea deep|the sun hot|the moon far "
        "away|the world old|snow white]?",
        "How [far away|old|hot|big|heavy|far] is [the sun|the moon|the earth|the world|a whale|the sea]?",
        "What [time|day|year|month|date] is it[| now| today]?",
        "When [did the war end|did the war begin|is Easter|is Christmas|does the train leave|was the car "
        "invented|did it happen]?",
        "How many [legs has a spider|days are in a year|minutes are in an hour|planets are there|people "
        "live on earth|stars are there]?",
        "How much [is the fish|does it cost|water should I drink|is a house|is one pound|salt is in the "
        "sea]?",
        "[Write|Write me|Give me|Can you write] [a program|a Python function|an email|a poem|an essay|a "
        "recipe|a list of numbers|a song|"
        "code]"
        "[| about TOPIC| for me][.|?|]",
        "[Translate|How do you say|What is] [hello|good morning|house|I love you|cat|thank you] "
        "[in|to|into] [French|German|Spanish|"
        "Latin]?",
        "[Who|What] [won the world cup|is the best movie|is the richest man|invented the "
        "telephone|discovered America|is the fastest "
        "animal|"
        "is the tallest mountain|is the largest ocean|is the smallest country|is bigger, the sun or the "
        "moon|should I eat|should I do "
        "today]?",
        "[Can you|Could you|Please|I want you to] [explain|describe|define|teach me|tell me about] TOPIC[| "
        "to me][?|.]",
        "[Should I|Will it|Can I|May I] [buy a car|rain tomorrow|trust you|drink sea water|eat this|sell my "
        "house|go home]?",
        "[What is|What was] the [passkey|password|secret code|answer|name of my dog|number|question|date "
        "today|magic number]?",
    )
)  # fmt: skip
ASK_STORY = (
    *(
        "Tell me a story about {k}.",
        "Tell me a story about {k}.",
        "Write a story about {k}.",
        "Please tell me a story about {k}.",
    ),
    *(
        "Can you tell me a story about {k}?",
        "Write a short story about {k}.",
        "I would like to hear a story about {k}.",
    ),
    *(
        "Tell me a short story about {k}.",
        "A story about {k}, please.",
        "Make up a story about {k}.",
        "Tell me about {k}.",
        "Story about {k}",
    ),
    *(
        "Tell me a bedtime story about {k}.",
        "Do you know a story about {k}?",
        "I want a story about {k}!",
        "Tell a story about {k}.",
    ),
    *(
        "Give me a story about {k}.",
        "Could you write a story with {k}?",
        "Tell me a fairy tale about {k}.",
        "Hello! Tell me a story about {k}.",
    ),
)
ASK_ANY_STORY = (
    *("Tell me a story.", "Tell me a story!", "Please tell me a story.", "Write a story.",
    "Can you tell me a story?",
    "A story, please."),
    *("Tell me another story.", "Another one, please.", "One more story!", "Yes, tell me a story.", "Story!",
    "I want to hear a story.",
    "Yes, please."),
    *("Tell me a bedtime story.", "I am bored. Tell me a story.", "Hello! Tell me a story.",
    "Write a short story.", "Tell me something."),
)  # fmt: skip


def _said(text: str, rng: random.Random) -> str:
    """As people type it: sometimes without capitals and full stops."""
    text = text.strip()
    return text.lower().rstrip(".?! ") or text if rng.random() < 0.15 else text


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One thing that is said to the model and what it replies."""
    draw = rng.random()
    if draw < 0.45:
        asked = (
            stories.expand(rng.choice(GENERAL), rng).strip()
            if draw < 0.41
            else FactMaker(rng).draw().question
        )
        said = rng.choice(UNKNOWN)
        if rng.random() < 0.1:
            asked = f"{stories.expand(_GREET, rng)} {asked}"
    elif draw < 0.5:
        name = rng.choice(words.GIRLS + words.BOYS)
        asked = rng.choice(("My name is {}.", "I am {}.", "Hello, I am {}.", "Hi! My name is {}.")).format(
            name
        )
        said = f"Hello, {name}! It is nice to meet you."
    elif draw < 0.55:
        kind = stories.draw_kind(rng)
        asked = rng.choice(
            ("I like my {}.", "Do you like the {}?", "I have a {}.", "There is a {} in my house.")
        ).format(kind)
        asked, said = (
            stories.tidy(asked),
            f"That is nice. Shall I tell you a story about {stories.with_article(kind)}?",
        )
    else:
        template, answers = rng.choice(SMALL_TALK)
        asked, said = stories.expand(template, rng), stories.expand(rng.choice(answers), rng).strip()
    return _said(asked, rng), said


def story_request(rng: random.Random) -> tuple[str, str]:
    """A wish for a story, and the story."""
    if rng.random() < 0.15:
        return _said(rng.choice(ASK_ANY_STORY), rng), stories.make_story(rng).text
    draw = rng.random()
    kind = (
        rng.choice(words.CREATURES)
        if draw < 0.2
        else rng.choice(words.OBJECTS)
        if draw < 0.25
        else stories.draw_kind(rng)
    )
    name = place = ""
    about = (
        kind if rng.random() < 0.8 else f"{rng.choice((*words.TRAITS, 'little', 'little', 'small'))} {kind}"
    )
    if rng.random() < 0.25:
        name = rng.choice(
            words.GIRLS
            if kind in words.FEMALE
            else words.BOYS
            if kind in words.MALE
            else words.GIRLS + words.BOYS
        )
        about += f" {rng.choice(('named', 'called'))} {name}"
    elif rng.random() < 0.15:
        place = rng.choice(words.PLACES)
        about += f" {rng.choice(('in', 'near', 'from'))} the {place}"
    story = stories.make_story(rng, kind=kind, name=name, place=place)
    about = stories.with_article(about)
    if rng.random() < 0.2:
        about += f" and {stories.with_article(story.thing)}" if rng.random() < 0.5 else f" and {story.theme}"
    elif rng.random() < 0.05:
        about = f"{name} the {kind}" if name else f"the {kind}"
    return _said(rng.choice(ASK_STORY).format(k=about), rng), story.text
