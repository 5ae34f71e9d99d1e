"""The tree of errors: every fault a user can cause or meet, each saying what was asked, what is there, what
to try.

    PenstockError
        ConfigError
        CheckpointError
        UnsupportedModelError
        RequestError
            LengthError
            StructureError
                CrowdedError          api/structures.py
        BudgetError
        DeviceError
            PinningError              memory/arena.py
            Closed                    parallel/channel.py
        StepMemoryError
        EngineClosedError
        StoreError                    kv/store/segments.py
            StoreLocked               kv/store/segments.py
            StoreFull                 kv/store/blocks.py
        LostKV                        kv/store/diskpool.py
        SecretError                   kv/store/seal.py
        ReadError                     memory/disk.py
        PackError                     weights/pack/writer.py
        BusyError                     server/broker/calls.py
        DeadlineError                 server/broker/calls.py
        FieldError                    server/wire/requests.py
        NotKeptError                  server/answers/store.py
        LostError                     server/fleet/requests.py

Those without a file are here; the others stand where they are raised. Most of the others are turned into one
of these, or into an HTTP status, before anybody sees them.
"""


class PenstockError(Exception):
    """Root of all errors raised on purpose. The message is one line, fit to be shown to a person."""


class ConfigError(PenstockError):
    """A setting that does not parse or cannot be honoured."""


class CheckpointError(PenstockError):
    """A model directory, file, header or tensor that is missing, damaged or not what the config promises."""


class UnsupportedModelError(PenstockError):
    """A sound checkpoint of something this engine does not run. Names the config key and what is
    supported."""


class RequestError(PenstockError):
    """A request that cannot be served as asked: sampling values, prompt, lengths. Other requests are not
    affected."""


class LengthError(RequestError):
    """A prompt that is too long, or too much output asked of it, for the context or the room for KV."""


class StructureError(RequestError):
    """A schema, regex or grammar for an output that is none, asks for too much, or cannot be followed with
    this model."""


class BudgetError(PenstockError):
    """A memory budget in which the model, or even one layer of it, does not fit."""


class DeviceError(PenstockError):
    """A device that was asked for and is not there, or that failed."""


class StepMemoryError(PenstockError):
    """A step that takes more memory than the device has. The engine tries smaller ones, and ends a request
    that fits into none of them."""


class EngineClosedError(PenstockError):
    """A call on an engine that has been closed or has failed."""
