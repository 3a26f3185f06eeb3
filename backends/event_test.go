package backends

import "testing"

func TestEvent(t *testing.T) {
	var e Event
	e.Notify() // nobody waits
	first := e.Next()
	if e.Next() != first {
		t.Error("two channels for one event")
	}
	e.Notify()
	<-first
	second := e.Next()
	select {
	case <-second:
		t.Error("an event that was before is seen again")
	default:
	}
	e.Notify()
	<-second
}

func TestRegistryStateChanged(t *testing.T) {
	b := &Backend{Name: "b"}
	r, err := NewRegistry([]*Backend{b})
	if err != nil {
		t.Fatal(err)
	}
	changed := r.StateChanged()
	b.SetState(Down)
	select {
	case <-changed:
		t.Error("told of a state that is what it was")
	default:
	}
	for _, change := range []func(){func() { b.SetState(Ready) }, b.Drain, b.Undrain, b.Retire, func() { b.SetState(Down) }} {
		changed = r.StateChanged()
		change()
		<-changed
	}
}
