"""Trains the built-in tokenizer: a byte-level BPE of some 4,000 tokens with ChatML-like special tokens, from a word
list and a seed. Run it with python -m pointsman_lab.tokenizer_training"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from pointsman.adapters.tokenizer.tokenizer import BUILTIN_DIRECTORY

VOCAB_SIZE = 4096
SENTENCES = 30_000
SEED = 20260101
END_OF_TEXT, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'Tools that may be called, one JSON object a line:\\n' }}
{%- for tool in tools %}
{{- tool | tojson }}{{- '\\n' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if not (tools and loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\ncall ' + call.function.name + ' ' }}{{- call.function.arguments | tojson }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def _words(listed: str) -> list[str]:
    return listed.split()


FUNCTION_WORDS = _words(
    "the of and to a in is that for it with as was on be by this are from or at an not have has had but they you we "
    "he she his her its their our your my one two three all more most some any each other such than then so if no "
    "can will would could should may might must do does did done been being there here when where which who what "
    "how why into out up down over under about after before between through during without within again very just "
    "only also even still yet both either neither because while until since though although however therefore"
)
STEMS = _words(
    "account act add address age agree air allow answer appear apply area arm arrive ask attack author balance bank "
    "base bear beat begin belong bird block blood blue board boat body book border bottom box branch bread break "
    "bridge bright bring brother brown build burn business buy call camp captain car card care carry case cat cause "
    "cell center certain chain chair chance change charge chart check chief child choice circle citizen city claim "
    "class clean clear climb clock close cloud coast coat cold collect color column come common company compare "
    "complete condition connect consider contain continue control cook cool copy corner correct cost cotton count "
    "country course court cover cross crowd current curve custom cut damage dance danger dark data daughter day deal "
    "death decide deep degree deliver demand depend describe desert design detail develop device differ dinner "
    "direct discover discuss distance divide doctor dog dollar door doubt draw dream dress drink drive drop dry dust "
    "early earth ease east edge educate effect effort electric element employ empty end enemy energy engine enjoy "
    "enter equal escape event evidence exact example except exchange exercise exist expect experience explain express "
    "eye face fact factor fail fair fall family farm fast father favor fear feed feel field fight figure file fill "
    "final find finger finish fire firm fish fit flat flow flower fly fold follow food foot force foreign forest form "
    "fortune forward frame free fresh friend front fruit fuel full function game garden gas gather general gentle "
    "girl give glass gold good govern grand grass gray green ground group grow guard guess guide habit hair half hand "
    "happen happy hard head health hear heart heat heavy help hide high hill history hold hole home honor hope horse "
    "hospital hot hour house human hundred hunt hurry idea image imagine improve include increase indicate industry "
    "inform insect interest invent iron island issue job join journey judge jump keep key kill kind king kitchen know "
    "labor lady lake land language large laugh law lead leaf learn leave left length less letter level library lie "
    "life lift light limit line list listen little live local long look lose loud love low machine mail main major "
    "make manner map mark market master match material matter measure meat meet member memory mention message metal "
    "method middle mile milk million mind mine minute mirror miss mistake mix model modern moment money month moon "
    "morning mother motion mountain mouth move muscle music name nation nature near neck need neighbor network never "
    "new news night noise north note nothing notice number object observe occur ocean offer office oil old open "
    "operate opinion opposite order organ origin own page pain paint pair paper parent park part party pass past path "
    "pattern pause pay peace people perfect perform period person phrase picture piece place plain plan plane planet "
    "plant plate play please point poor popular port position possible post pound power practice prepare present "
    "press pretty prevent price print prison private problem process produce product program promise proper protect "
    "prove provide public pull purpose push quality quarter queen question quick quiet race radio rail rain raise "
    "range rate reach read ready real reason receive record red reduce region regular relate remain remember remove "
    "repeat reply report represent require rest result return rich ride right ring rise river road rock roll roof "
    "room root rope round row rule run sail salt same sand save scale school science score sea search season seat "
    "second secret section see seed seem select self sell send sense sentence separate serious serve set settle shape "
    "share sharp sheet shelf shine ship shoe shop shore short shoulder shout show side sight sign signal silence "
    "silver similar simple sing single sister sit size skill skin sky sleep slow small smell smile smoke smooth snow "
    "social society soft soil soldier solve son song sort sound source south space speak special speed spell spend "
    "spirit spot spread spring square stage stand star start state station stay steam steel step stick stone stop "
    "store storm story straight strange stream street strength stretch strong student study subject success sudden "
    "sugar suggest suit summer sun supply support suppose sure surface surprise sweet swim symbol system table talk "
    "task taste teach team tell temper term test thank thick thin thing think thought thousand thread thus tie time "
    "tiny tool top total touch town track trade train travel tree triangle trip trouble truck true trust truth try "
    "turn type understand unit universe use usual valley value vary verb view village visit voice vote wait walk wall "
    "want war warm wash watch water wave wear weather week weigh west wheel white whole wide wife wild wind window "
    "winter wire wish woman wonder wood word work world worry worth write wrong yard year yellow young zero"
)
ENDINGS = ("", "", "", "", "s", "s", "ed", "ing", "er", "ly", "ment", "able", "ness")
CODE_WORDS = _words(
    "def class return import from self None True False async await for while if else elif try except finally raise "
    "with lambda yield print len range list dict str int float bool function const let var new null undefined public "
    "static void struct enum match impl fn use mod select insert update delete where join order group limit"
)
WORLD_WORDS = _words(
    "straße über schön größe müssen français être où déjà élève niño mañana señor está também coração não привет "
    "мир слово город время человек 世界 你好 模型 请求 缓存 引擎 こんにちは 東京 日本 한국 서울 안녕 مرحبا שלום ελληνικά λόγος"
)


def train() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(training_text(random.Random(SEED)), trainer)
    return backend


def write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    train().save(str(directory / "tokenizer.json"), pretty=False)
    config = {"eos_token": MESSAGE_END, "pad_token": END_OF_TEXT, "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8")


def training_text(chance: random.Random) -> Iterator[str]:
    for _ in range(SENTENCES):
        kind = chance.randrange(20)
        if kind < 15:
            yield _sentence(chance)
        elif kind < 18:
            yield _code(chance)
        elif kind == 18:
            yield _numbers(chance)
        else:
            yield " ".join(chance.choices(WORLD_WORDS, k=12))


def _sentence(chance: random.Random) -> str:
    words = [
        chance.choice(FUNCTION_WORDS) if chance.randrange(2) else chance.choice(STEMS) + chance.choice(ENDINGS)
        for _ in range(chance.randrange(6, 18))
    ]
    words[chance.randrange(len(words))] += chance.choice((",", ",", ";", ":", "'s", " -"))
    return " ".join(words).capitalize() + chance.choice((". ", ". ", ".\n", "?\n", "!\n\n"))


def _code(chance: random.Random) -> str:
    indent = " " * 4 * chance.randrange(4)
    name, other = "_".join(chance.choices(STEMS, k=2)), chance.choice(STEMS)
    keyword, argument = chance.choices(CODE_WORDS, k=2)
    return chance.choice((
        f"{indent}{keyword} {name}({other}, {argument}):\n",
        f"{indent}{name} = {other}.{argument}({chance.randrange(1000)})\n",
        f'{indent}{{"{name}": "{other}", "{keyword}": [{chance.randrange(100)}, {argument}]}},\n',
        f"{indent}# {_sentence(chance)}",
        f"{indent}<{other} {keyword}='{name}'>{argument}</{other}>;\n",
    ))  # fmt: skip


def _numbers(chance: random.Random) -> str:
    year, day, amount = chance.randrange(1900, 2100), chance.randrange(1, 29), chance.randrange(10**6)
    return f"{year}-{day:02d}-{chance.randrange(1, 13):02d} {chance.randrange(24)}:{chance.randrange(60):02d} ${amount / 100:.2f} {amount}\n"


if __name__ == "__main__":
    write(BUILTIN_DIRECTORY)
