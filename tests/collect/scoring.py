"""What users write: a reward, a session and an engine, loaded by name in the tests of the command."""

import anyio

from groupstate import Generation, Trajectory, VersionSpan


def reward(prompt, text):
    return float(text == str(prompt.extra["answer"]))


async def async_reward(prompt, text):
    return {"reward": float(len(text)), "length": len(text)}


def broken_reward(prompt, text):
    raise KeyError("answer")


async def session(ctx):
    await anyio.sleep(0.005)
    return Trajectory(reward=float(ctx.session % 2), text=ctx.prompt.content)


async def slow_session(ctx):
    await anyio.sleep(0.05)
    return Trajectory(reward=float(ctx.session % 2), text=ctx.prompt.content)


class Characters:
    eos_id = 0

    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class Echo:
    """Answers the prompt's first characters, one fewer each time."""

    weight_version = 0
    tokenizer = Characters()

    def __init__(self, length):
        self._length = length

    async def generate(self, request):
        self._length -= 1
        tokens = tuple(request.prompt_ids[: max(1, self._length)])
        return Generation(
            tokens, (-0.5,) * len(tokens), (VersionSpan(0, len(tokens), 0),), "stop", "".join(map(chr, tokens))
        )

    async def aclose(self):
        pass


def make_echo(length=100):
    return Echo(length)


async def make_echo_async():
    return Echo(100)


def make_nothing():
    return None


not_a_function = 3
