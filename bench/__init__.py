"""`surefoot bench`: a load generator for any OpenAI-compatible server. It knows servers over HTTP only."""
