"""Decision packs: what was measured and decided for a model, as one JSON file that travels.

A pack is canonical JSON with a content hash and, where wanted, a signature (:mod:`.content`,
:mod:`.signing`). It is read strictly, since it comes from outside (:mod:`.strict_json`,
:mod:`.codec`), and graded against the machine that opens it (:mod:`.grade`): nothing made elsewhere
decides here silently. ``docs/packs.md`` is the guide, ``pack.schema.json`` the schema.
"""
