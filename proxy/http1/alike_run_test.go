package http1_test

import (
	"slices"
	"strings"
	"testing"
)

// wanted is a difference from net/http that is meant.
type wanted struct {
	why   string
	cases []string            // by their names, or what these begin with
	alter func(string) string // makes answers of both alike; nil: ours are
	ours  string              // in what ours does
}

func withoutBody(answer string) string { head, _, _ := strings.Cut(answer, "] "); return head }

func unannounced(answer string) string { return strings.Replace(answer, "Connection: close; ", "", 1) }

// differences are all that are meant, but for those that asked tells of: nothing is
// sniffed (handlers say what they send), refusals say their length and not their
// reason twice, and of interim answers, trailers, hijacking and full duplex there is
// none.
func differences() []wanted {
	return []wanted{
		{why: "a length that is none is not sent", ours: `Content-Length: 5; Content-Type: text/plain`,
			cases: []string{"length said, nonsense", "length said, negative"}},
		{why: "no interim answers are sent", ours: `200 OK [`, cases: []string{"103"}},
		{why: "of an answer that is broken off anything may arrive", alter: withoutBody,
			cases: []string{"abort after middle", "abort after length", "abort after flush and more"}},
		{why: "an absolute URI names the host; net/http wants it twice", ours: `200 OK [Content-Length: 27; Content-Type: text/plain; Saw: GET] "http://a/b?c`,
			cases: []string{"absolute without host"}},
		{why: "where an absolute URI names the host, Host is of no interest", ours: `200 OK [Content-Length: 24; Content-Type: text/plain; Saw: GET] "http://a/`,
			cases: []string{"absolute, host malformed"}},
		{why: "there is no http URI without a host (RFC 9110, 4.2.1)", ours: "missing required Host header", cases: []string{"empty host"}},
		{why: "net/http takes keep-alive for the stronger word", ours: "200 OK [Content-Length: 17; Content-Type: text/plain; Saw: GET]", cases: []string{"1.0, keep and close"}},
		{why: "HTTP/2 in the clear is not spoken, so no handler sees its preface", ours: "505 HTTP Version", cases: []string{"preface"}},
		{why: "the bound is the same for later requests; net/http has 4 KiB more for them", ours: "431 Request Header", cases: []string{"header too long", "target too long"}},
		{why: "what makes no sense in a body that nobody read is found after the answer, not before", alter: unannounced,
			cases: []string{"bad size", "bad trailer", "negative size", "huge size", "chunk too long", "chunk too short", "chunks with LF", "extensions", "long extension",
				"long trailer", "much overhead"}},
		{why: "that a connection is of no more use is said though the client may know", alter: unannounced, cases: []string{"upload cut"}},
		{why: "that a body is too long to be read is said though the handler has closed it", alter: unannounced,
			cases: []string{"one byte more closed", "more than is read closed", "large closed"}},
		{why: "the rest of a body that was asked for is read like any other", ours: "100 Continue", cases: []string{"expected half read", "expected read to the byte"}},
	}
}

// comparison knows which of the differences were met.
type comparison struct {
	*testing.T
	wanted []wanted
	met    []bool
}

func comparing(t *testing.T) *comparison {
	c := &comparison{T: t, wanted: differences()}
	c.met = make([]bool, len(c.wanted))
	return c
}

func equal(a, b seen) bool {
	return a.open == b.open && slices.Equal(a.answers, b.answers) && slices.Equal(a.notes, b.notes)
}

func (c *comparison) compare(name string, h noting, steps []step) {
	c.Run(name, func(t *testing.T) {
		our, their := alike(t, h, steps)
		if equal(our, their) {
			return
		}
		for i, w := range c.wanted {
			if !slices.ContainsFunc(w.cases, func(begin string) bool { return strings.HasPrefix(name, begin) }) {
				continue
			}
			if w.alter != nil {
				for _, s := range []*seen{&our, &their} {
					for i, a := range s.answers {
						s.answers[i] = w.alter(a)
					}
				}
			}
			if w.alter != nil && equal(our, their) || w.alter == nil && strings.Contains(our.String(), w.ours) {
				c.met[i] = true
				return
			}
		}
		t.Errorf("ours:\n%vnet/http:\n%v", our, their)
	})
}

// noneLeft fails for those of the differences that a test is to meet and has not.
func (c *comparison) noneLeft(first, last string) {
	c.Helper()
	between := false
	for i, w := range c.wanted {
		between = between || w.cases[0] == first
		if between && !c.met[i] {
			c.Errorf("no more a difference: %s", w.why)
		}
		between = between && w.cases[0] != last
	}
}

// What handlers answer arrives in the same way.
func TestAnswersAreAsNetHTTPs(t *testing.T) {
	c := comparing(t)
	for what, answer := range bodiesOfAnswers() {
		for how, ask := range asking() {
			c.compare(what+" to "+how, answers(answer), says(ask+get+last))
		}
	}
	c.noneLeft("length said, nonsense", "abort after middle")
}

// What stands before a body is understood, or refused, in the same way.
func TestHeadsAreUnderstoodAsByNetHTTP(t *testing.T) {
	c := comparing(t)
	for name, head := range heads() {
		c.compare(name, echo, says(head+get+last))
		c.compare(name+", later", echo, says(get, head, get, last))
		c.compare(name+", and no more", echo, []step{{send: head, fin: true}})
	}
	c.noneLeft("absolute without host", "header too long")
}

// Bodies end where net/http has them end, and so do connections.
func TestBodiesAreReadAsByNetHTTP(t *testing.T) {
	c := comparing(t)
	for what, request := range framed() {
		for how, h := range readers() {
			c.compare(what+" "+how, h, says(request+get+last))
			c.compare(what+" "+how+", later", h, says(get+request, get, last))
		}
	}
	c.noneLeft("bad size", "bad size")
	c.noneLeft("one byte more closed", "expected half read")
}
