"""HTTP, tenants and wiring: the only part of Surefoot that speaks the OpenAI API."""
