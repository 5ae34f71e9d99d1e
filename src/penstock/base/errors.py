"""The tree of errors: every fault a user can cause or meet, each saying what was asked, what is there, what
to try.

    PenstockError
        ConfigError
        CheckpointError
            HubError                  hub/faults.py
                UnreachableError      hub/faults.py
        UnsupportedModelError
        RequestError
            LengthError
            AdapterError
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
        PackError                     weights/pack/directory.py
        BusyError                     server/broker/calls.py
        DeadlineError                 server/broker/calls.py
        FieldError                    server/wire/decoding.py
        NotKeptError                  server/answers/store.py
        LoadError                     server/on_demand/model.py
        LostError                     server/fleet/requests.py

Those without a file are here; the others stand where they are raised. Most of the others are turned into one
of these, or into an HTTP status, before anybody sees them.
"""


class PenstockError(Exception):
    """Stands at the root of all errors raised on purpose. The message is one line, fit for a person."""


class ConfigError(PenstockError):
    """A setting does not parse or cannot be honoured."""


class CheckpointError(PenstockError):
    """A model directory, file, header or tensor is missing, damaged or not what the config promises."""


class UnsupportedModelError(PenstockError):
    """The checkpoint is sound, but this engine does not run its kind. The message names the config key
    and what is supported.
    """


class RequestError(PenstockError):
    """A request cannot be served as asked: sampling values, prompt, lengths. Other requests are not
    affected."""


class LengthError(RequestError):
    """A prompt is too long, or too much output is asked of it, for the context or the room for KV."""


class AdapterError(RequestError):
    """A request names a LoRA adapter that is not loaded, or not any more."""


class StructureError(RequestError):
    """A schema, regex or grammar for an output is none, asks too much, or cannot be followed with this
    model."""


class BudgetError(PenstockError):
    """The model, or even one layer of it, does not fit into a memory budget."""


class DeviceError(PenstockError):
    """A device was asked for and is not there, or it failed."""


class StepMemoryError(PenstockError):
    """A step takes more memory than the device has.

    The engine tries smaller steps, and ends a request that fits into none of them.
    """


class EngineClosedError(PenstockError):
    """An engine was called that has been closed or has failed."""
