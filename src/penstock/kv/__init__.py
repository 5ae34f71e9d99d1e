"""The KV cache is here: ledgers that say where each block is, what moves blocks, and the store on the disk.

A block's walk, from file to file:

    computed   `ledger/blocks.py` allocates a page of the device, which the layers of a step fill
               (`movement/pool.py`).
    sealed     When the page is full, `ledger/keys.py` makes its key, and `Ledger.seal` lets others find it.
    host       `movement/transfers.py` copies it DOWN to `movement/hostpool.py`. `ledger/host.py` knows it.
    disk       It goes OUT to `store/blocks.py`. There `store/operations.py` seals it and writes it into a
               slot (`store/segments.py`), and `store/journal.py` names it. `ledger/disk.py` has its key.
    reused     The keys of a later prompt find it. It comes IN to the host and UP to a page, and is shared.

Room on each tier is made by the orders of `ledger/evict.py` and `ledger/prospect.py`.

Blocks of a request that outgrows the device go another way. The outbox of `movement/tiles.py` sends them to
the host layer by layer. `movement/staging.py` brings what does not fit there to `store/diskpool.py` and back.
The ring of `movement/tiles.py` lends them to attention as tiles.
"""
