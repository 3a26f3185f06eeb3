package http1_test

import (
	"strings"
	"testing"
)

// Whatever a client sends, ours takes it as net/http's server does, in one piece and
// in many: the same requests are seen, the same is answered, and the connection ends
// or goes on.
func FuzzClientsAlike(f *testing.F) {
	for _, requests := range []map[string]string{heads(), framed()} {
		for _, r := range requests {
			if len(r) < 500 {
				f.Add([]byte(r+get), byte(0))
			}
		}
	}
	f.Add([]byte(postChunked+chunks("hello, world", 5)+"\r\n"+keep10+expecting+"hello"+last), byte(3))
	f.Fuzz(func(t *testing.T, sent []byte, size byte) {
		if len(sent) > 4000 { // a header is at most 5 KiB long, which net/http does not see to as exactly
			return
		}
		steps := []step{{send: string(sent)}}
		if size > 0 {
			steps = pieces(string(sent), int(size), 0)
		}
		our, their := alike(t, echo, steps)
		for _, s := range []*seen{&our, &their} {
			for i, a := range s.answers {
				s.answers[i] = unannounced(a)
			}
		}
		if equal(our, their) || meant(string(sent), our, their) {
			return
		}
		t.Errorf("ours:\n%vnet/http:\n%v", our, their)
	})
}

// meant reports whether the first answer that differs does so as differences has it.
func meant(sent string, our, their seen) bool {
	ours, theirs := "", ""
	for i := range max(len(our.answers), len(their.answers)) {
		ours, theirs = "", ""
		if i < len(our.answers) {
			ours = our.answers[i]
		}
		if i < len(their.answers) {
			theirs = their.answers[i]
		}
		if ours != theirs {
			break
		}
	}
	small := strings.ToLower(sent)
	// net/http also finds the word between spaces, where no list has it.
	closes := !their.open && strings.Contains(small, "close")
	elsewhere := strings.Contains(sent, "://") || strings.Contains(sent, "CONNECT") // the host is the URI's
	switch {
	case ours == theirs && closes, theirs == "" && closes:
		return true
	case ours == theirs: // net/http waits for the body of what it has refused
		return their.open && !our.open && strings.Contains(ours, "417 Expectation Failed")
	case strings.Contains(ours, "400 Bad Request: missing required Host header"):
		return strings.Contains(small, "host:") // it is empty
	case strings.Contains(ours, "400 Bad Request: malformed Host header"), strings.Contains(theirs, "required Host header"), strings.Contains(theirs, "malformed Host header"):
		return elsewhere
	case strings.Contains(ours, "505 HTTP Version"):
		return strings.Contains(theirs, "Saw: PRI")
	case strings.Contains(ours, "417 Expectation Failed"): // net/http also finds the word between spaces
		return strings.Contains(small, "100-continue")
	case strings.HasPrefix(theirs, "HTTP/1.0") && strings.Contains(theirs, "Connection: keep-alive"):
		return strings.Replace(theirs, "Connection: keep-alive; ", "", 1) == ours
	case theirs == "" && their.open: // less than four bytes are no request to net/http that is worth a look
		return strings.Contains(ours, "400 Bad Request") && len(our.answers) == len(their.answers)+1
	}
	return false
}
