from tests.helpers import hypothesis_profiles

hypothesis_profiles.load()
