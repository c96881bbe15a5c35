"""A language model beside the policy that learns from outcomes what each token is worth."""
