"""Common English words, nearly all of them one token (with the space before them) in today's vocabularies."""

from __future__ import annotations

from random import Random

TEXT = """
about above across after again against air all almost alone along also always among and animal
answer any area arm army around art ask at away baby back bad ball bank base be bear beat beauty
became because bed before began behind believe below best better between big bird black blood blue
board boat body bone book born both bottom box boy break bring brother brown build business but buy
by call came can car care carry case catch cause center certain chance change chart check child
choose church circle city class clean clear climb clock close cloud coast cold color come common
company complete control cook cool copy corn corner cost could count country course cover create
cross crowd cry current cut dance dark day dead deal dear death decide deep degree design develop
did differ direct discuss doctor does dog door double down draw dream dress drink drive drop dry
during each early earth east easy eat edge effect egg eight either electric else end enemy energy
engine enough enter equal even evening event ever every exact example exercise expect experience
experiment eye face fact fair fall family famous far farm fast father fear feed feel feet fell felt
few field fight figure fill final find fine finger finish fire first fish fit five flat floor flow
flower fly follow food foot force forest form forward found four free fresh friend from front fruit
full game garden gas gather gave general gentle get girl give glad glass go gold gone good got
govern grand grass gray great green grew ground group grow guess guide gun had hair half hand happen
happy hard has hat have he head hear heart heat heavy held help her here high hill him his history
hit hold hole home hope horse hot hour house how huge human hundred
"""
WORDS = TEXT.split()


def sentence(random: Random, num_words: int) -> str:
    """That many words. Two sentences hardly ever share a beginning, so a prefix cache gains nothing."""
    return " ".join(random.choices(WORDS, k=num_words))
