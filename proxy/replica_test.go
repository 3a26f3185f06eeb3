package proxy

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
)

// replica is one server that the proxy may choose, misbehaving as it likes.
type replica struct {
	name   string
	key    string   // the API key that the proxy has for it
	models []string // "m" when empty; "adapter<base" is a LoRA adapter of base
	script func(*session)

	listener net.Listener
	open     sync.WaitGroup
	over     chan struct{} // closed when the test ends

	mu    sync.Mutex
	seen  []seen
	conns []net.Conn
}

// seen is a request as a replica got it.
type seen struct {
	*http.Request
	body string
}

// session is one connection as a replica sees it.
type session struct {
	net.Conn
	br      *bufio.Reader
	replica *replica
	n       int // 1 for the first connection that the replica accepted
}

// request reads one request whole. ok is false when the proxy closed instead.
func (s *session) request() (r seen, ok bool) {
	req, err := http.ReadRequest(s.br)
	if err != nil {
		return seen{}, false
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return seen{}, false
	}
	r = seen{req, string(body)}
	s.replica.mu.Lock()
	s.replica.seen = append(s.replica.seen, r)
	s.replica.mu.Unlock()
	return r, true
}

// say writes; an error shows at the other end.
func (s *session) say(parts ...string) {
	for _, p := range parts {
		io.WriteString(s.Conn, p)
	}
}

// closed waits for the proxy to close the connection.
func (s *session) closed() { io.Copy(io.Discard, s.br) }

// reset closes the connection the hard way.
func (s *session) reset() {
	s.Conn.(*net.TCPConn).SetLinger(0)
	s.Conn.Close()
}

// always answers every request with the same bytes.
func always(answer ...string) func(*session) {
	return func(s *session) {
		for {
			if _, ok := s.request(); !ok {
				return
			}
			s.say(answer...)
		}
	}
}

// once answers one request and closes the connection.
func once(answer ...string) func(*session) {
	return func(s *session) {
		s.request()
		s.say(answer...)
	}
}

// requests is what the replica has seen so far.
func (r *replica) requests() []seen {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]seen(nil), r.seen...)
}

func (r *replica) start(t testing.TB) { r.startAt(t, "127.0.0.1:0") }

func (r *replica) startAt(t testing.TB, address string) {
	var err error
	if r.listener, err = net.Listen("tcp", address); err != nil {
		t.Fatal(err)
	}
	r.over = make(chan struct{})
	r.open.Go(func() {
		for n := 1; ; n++ {
			c, err := r.listener.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, c)
			r.mu.Unlock()
			r.open.Go(func() {
				defer c.Close()
				r.script(&session{c, bufio.NewReader(c), r, n})
			})
		}
	})
}

func (r *replica) stop() {
	close(r.over)
	r.listener.Close()
	r.mu.Lock()
	for _, c := range r.conns {
		c.Close()
	}
	r.mu.Unlock()
	r.open.Wait()
}
