package router

import "testing"

// TestABackendThatIsFullIsALaterChoice holds that one that refuses requests for
// its full queue is not sent all of them because it has so little to do.
func TestABackendThatIsFullIsALaterChoice(t *testing.T) {
	s := newBreakers(t, 2)
	s.send(0).Release(Outcome{End: Served}) // it holds the prompt
	refuse := func() { s.send(0).Release(Outcome{Failed: true, Full: true, End: Unseen}) }
	refuse()
	s.goesTo("after it refused one", 1)
	s.clock.advance(fullLasts)
	s.goesTo("a while later", 0)

	under := s.send(0)
	refuse()
	s.goesTo("after it refused another", 1)
	under.Release(Outcome{End: Served})
	s.goesTo("when a place fell free", 0)

	refuse()
	s.send(1).Release(Outcome{Failed: true, Full: true, End: Unseen})
	s.goesTo("when all are full", 0)
}
