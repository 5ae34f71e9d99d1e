"""Prints a long text in which one fact is hidden, and a question for it; on stderr, where it stands and the
right answer.

python tools/hide.py --tokens 8000 --depth 0.3 --seed 1 | penstock run --chat -
"""

import argparse
import random
import sys
from pathlib import Path

from needles import make_sample
from stories import make_story
from tokenizers import Tokenizer

TOKENIZER = Path(__file__).parent.parent / "src" / "penstock" / "shipped" / "tokenizer.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--depth", type=float, default=0.3, help="0 is the beginning of the text, 1 its end")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    text = "\n\n".join(make_story(rng).text for _ in range(400))
    sample = make_sample(args.tokens, args.depth, rng, Tokenizer.from_file(str(TOKENIZER)), text)
    print(sample.messages[0]["content"])
    print(
        f"{args.tokens:,} tokens of stories; the fact stands at {args.depth:.0%}, the right answer is: "
        f"{sample.answer}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
