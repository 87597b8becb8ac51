"""Forge in other libraries. Each module here needs the library it is named after, and nothing else imports it."""
