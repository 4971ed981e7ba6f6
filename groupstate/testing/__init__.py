"""What tests of groupstate, and of rules made for it, are written with.

`notation`: a history in a few short lines, driven through the real ledger and replayed after every event.
"""
