"""Word lists for the generated stories and for the keys and values of hidden facts."""

from __future__ import annotations


def listed(text: str, by: str | None = None) -> list[str]:
    """The words of a text, or its parts between `by`."""
    return text.split(by)


GIRLS = listed(
    "Anna Mary Lily Rosa Clara Emma Nora Ella Mia Ida Ruth Jane Alice Daisy Molly Polly Hannah Julia Marian "
    "Greta Heidi Lucy Sophie Tilda "
    "Wendy Zoe Amber Bella Celia Dora Edith Fiona Grace Hazel Iris Josie Kate Lena Maya Nell Olive Pearl "
    "Sally Tess Una Vera Willa Nina "
    "Agnes Betty Carmen Della Elsie Flora Gwen Hilda Ivy Jenny Kira Linda Martha Nancy Paula Rita Stella "
    "Thea Viola Winnie"
)
BOYS = listed(
    "Tom Ben Sam Max Jack Leo Paul Peter Oscar Henry Felix Hugo Otto Emil Jonas Karl Simon Toby Walter "
    "Arthur Albert Bruno Casper David "
    "Edgar Frank George Harold Ivan Jasper Kevin Lucas Martin Nathan Oliver Patrick Robert Samuel Theo "
    "Victor William Adam Boris Conrad "
    "Daniel Eric Fred Gus Hector Isaac Joel Kit Lewis Miles Ned Owen Philip Ralph Stanley Tim Vincent "
    "Wilbur Andrew Barney Charlie Eddie"
)
MAMMALS = listed(
    "fox rabbit hedgehog mouse bear badger squirrel otter mole deer cat puppy lamb goat pony hare beaver "
    "kitten piglet donkey raccoon "
    "wolf tiger lion monkey elephant panda"
)
BIRDS = listed("duck owl robin sparrow crow goose penguin hen swan raven")
PEOPLE = listed(
    "baker miller shepherd sailor gardener tailor cobbler clockmaker farmer painter lamplighter beekeeper "
    "carpenter potter weaver "
    "musician teacher postman woodcutter cook"
)
CREATURES = listed(
    "dragon robot princess prince king queen knight wizard witch fairy giant pirate mermaid unicorn "
    "dinosaur astronaut doctor detective "
    "snowman dog horse cow pig chicken bird frog turtle snail butterfly bee snake dolphin kangaroo giraffe "
    "zebra parrot turkey ghost elf "
    "dwarf troll monster alien inventor magician clown captain soldier hunter thief doll train kite teapot "
    "cloud star tree"
)
FEMALE = listed("girl princess queen witch fairy mermaid cow")
MALE = listed("boy postman prince king wizard")
PETS = listed("dog dog cat cat rabbit pony hamster parrot hen goat horse mouse turtle puppy kitten bird")
LITTLE = listed("duckling kitten lamb puppy chick mouse bird squirrel rabbit turtle fawn bee frog piglet")
TRAITS = listed(
    "brave kind curious clever gentle cheerful shy patient careful honest friendly quiet lively stubborn "
    "thoughtful playful hopeful "
    "generous proud dreamy polite merry"
)
SIZES = listed("little little young")  # they follow a trait
COLORS = listed("red blue green yellow white brown golden silver purple orange pink gray black")
MATERIALS = listed("wooden silver golden copper glass paper woolen painted shiny old new tiny round striped")
OBJECTS = listed(
    "kite bell lantern drum whistle basket key hat scarf ball boat book blanket button ring spoon teapot "
    "umbrella flute map coin marble "
    "ribbon shell feather compass watch doll wagon cup candle brush quilt mirror box stone bucket jar "
    "pencil clock pillow sled puppet rope"
)
PLACES = listed(
    "forest|meadow|old "
    "mill|market|hill|lake|village|garden|bridge|orchard|harbor|castle|mountain|valley|cave|river|beach|farm|"
    "windmill|lighthouse|pond|tall tower|pine woods|stone wall|town square|school|barn|island|wheat "
    "field|waterfall",
    "|",
)
HOMES = (
    "in a [small|cozy|little|tiny] [house|cottage|cabin] [by|near|beside] the "
    "[river|lake|sea|forest|mill]|at the edge of a "
    "[dark|deep|green|quiet] forest|on a [small|busy|quiet|sunny] farm|in a village [by the sea|between two "
    "hills|at the foot of a "
    "mountain|where everyone knew everyone]|under the roots of an old oak tree|on top of a "
    "[green|windy|round] hill|"
    "in a [narrow|crooked|yellow|white] house [next to the bakery|at the end of the lane|with a red "
    "door|with a blue roof]|"
    "in a quiet valley full of flowers|near the harbor where the ships came in"
)
FOODS = listed(
    "bread|honey cakes|apple pie|soup|berries|warm "
    "milk|cheese|pancakes|nuts|plums|carrots|cookies|porridge|hot chocolate|"
    "strawberries|cherry tarts|pumpkin soup|toast and jam|roasted chestnuts|pears|butter cakes|tea and "
    "biscuits",
    "|",
)
FLOWERS = listed("daisies roses tulips poppies violets sunflowers bluebells buttercups lilies")
TREES = listed("oak pine birch apple willow chestnut cherry maple")

WEATHER = (
    "The sun was [warm|bright|shining] and the sky was [blue|clear|wide and blue].|A "
    "[soft|cool|gentle|warm] wind blew [through the "
    "trees|over the fields|from the hills].|It was [raining a little|a gray and foggy day|cold, and snow "
    "lay on the roofs].|White "
    "clouds moved slowly across the sky.|The birds were singing in the [trees|hedges|gardens].|The air "
    "smelled of [rain|flowers|fresh "
    "bread|wet leaves|pine needles|hay].|The leaves were turning [red and gold|yellow and brown].|The grass "
    "was still wet with dew."
    "|Far away a dog was barking.|The first snow had fallen in the night.|Bees were humming in the <flowers>."
)

LISTS: dict[str, list[str]] = {
    "color": COLORS,
    "food": FOODS,
    "flowers": FLOWERS,
    "tree": TREES,
    "little": LITTLE,
    "pet": PETS,
    "placeword": PLACES,
    "day": [
        "one [sunny|rainy|windy|cold|warm|quiet|bright|foggy|snowy] [morning|afternoon|evening|day]",
        "one [spring|summer|autumn|winter] [morning|day|afternoon|evening]",
        "early one morning",
        "late one afternoon",
        "one day",
        "one [Monday|Tuesday|Friday|Saturday|Sunday]",
        "on a [cold|warm|windy|golden] [autumn|spring|winter|summer] [morning|day]",
        "on the first day of [spring|summer|autumn|winter]",
    ],
    "glad": [
        "happy",
        "glad",
        "proud",
        "cheerful",
        "full of joy",
        "very pleased",
        "as happy as could be",
        "delighted",
    ],
    "sad": ["sad", "unhappy", "worried", "lonely", "sorry", "upset", "close to tears", "very quiet"],
    "scared": ["afraid", "frightened", "scared", "nervous", "a little afraid", "very frightened"],
    "slow": ["slowly", "carefully", "step by step", "quietly", "without a sound"],
    "fast": ["quickly", "as fast as possible", "at once", "in a hurry", "without waiting"],
    "said": ["said", "replied", "answered"],
    "asked": ["asked", "wondered"],
    "cried": ["cried", "shouted", "called", "called out"],
    "whispered": ["whispered", "murmured", "sighed"],
    "sound": listed(
        "a scratching sound|a soft tapping|a long, low whistle|a strange humming|a rustling|a creaking|a "
        "splash|a thin "
        "little cry|a sound like tiny bells",
        "|",
    ),
    "thing": listed(
        "bench|bed|table|cupboard|stove|chair|rug|stairs|wood pile|cart|hedge|bushes",
        "|",
    ),
    "skill": listed(
        "swim|whistle|skate|bake bread|ride a pony|play the flute|climb trees|row a "
        "boat|juggle|dance|paint|sew|catch a "
        "ball|sing in tune|tie a sailor's knot|read|play the drum|fold paper birds",
        "|",
    ),
    "gift": ["birthday", "name day", "wedding", "homecoming"],
}


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "|" and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [*parts, current]


LISTS["weather"] = _split_outside_brackets(WEATHER)
LISTS["home"] = _split_outside_brackets(HOMES)
LISTS["food"] = FOODS
