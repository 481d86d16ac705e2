"""How settings are read: sections, sections of extras, parts by name, YAML, profiles, the hub."""
