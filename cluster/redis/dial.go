package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"sync"
	"syscall"
	"time"
)

// dialer connects to servers and sentinels, and closes all connections when it is closed. It is safe for concurrent use.
type dialer struct {
	timeout time.Duration // of a connection and its TLS handshake
	tls     *tls.Config   // nil: without TLS
	hosts   []string      // that the URL names

	closing context.Context // done when the dialer is closed
	close   func()

	mu    sync.Mutex // guards what follows
	conns map[net.Conn]struct{}
	last  string // the address to which a connection was last tried
}

func newDialer(o *options) *dialer {
	d := &dialer{timeout: o.dialTimeout, tls: o.tls, hosts: o.hosts, conns: map[net.Conn]struct{}{}}
	d.closing, d.close = context.WithCancel(context.Background())
	return d
}

// dial connects, with TLS if the URL says so.
func (d *dialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if host, port, err := net.SplitHostPort(address); err == nil && host == "" && network != "unix" {
		// Of a node that does not know its own address: it is where the URL leads to.
		address = net.JoinHostPort(d.hosts[0], port)
	}
	d.setLastAddress(address)
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	defer context.AfterFunc(d.closing, cancel)()
	conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if d.tls == nil {
		socket := &checkedSocket{checkedConn: checkedConn{Conn: conn}, socket: conn.(syscall.Conn)}
		socket.onClose = func() { d.remove(socket) }
		return d.add(socket)
	}
	host, _, _ := net.SplitHostPort(address)
	secured := tls.Client(conn, d.tlsConfig(host))
	if err := secured.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, &net.OpError{Op: "TLS handshake", Net: network, Addr: conn.RemoteAddr(), Err: err}
	}
	checked := &checkedConn{Conn: secured}
	checked.onClose = func() { d.remove(checked) }
	return d.add(checked)
}

// tlsConfig returns the configuration for a host. Its certificate is valid for its own name, or for one that the URL has: the
// nodes of a Redis Cluster and sentinels may name servers by addresses that are in no certificate.
func (d *dialer) tlsConfig(host string) *tls.Config {
	c := d.tls.Clone()
	c.ServerName = host
	if c.InsecureSkipVerify {
		return c
	}
	c.InsecureSkipVerify = true // VerifyConnection verifies
	c.VerifyConnection = func(state tls.ConnectionState) error {
		leaf, intermediates := state.PeerCertificates[0], x509.NewCertPool()
		for _, certificate := range state.PeerCertificates[1:] {
			intermediates.AddCert(certificate)
		}
		var first error
		for _, name := range append([]string{host}, d.hosts...) {
			_, err := leaf.Verify(x509.VerifyOptions{DNSName: name, Roots: c.RootCAs, Intermediates: intermediates})
			if err == nil {
				return nil
			}
			first = cmp.Or(first, err)
		}
		return first
	}
	return c
}

// add returns the connection, or closes it if the dialer was closed.
func (d *dialer) add(conn net.Conn) (net.Conn, error) {
	d.mu.Lock()
	isClosed := d.closing.Err() != nil
	if !isClosed {
		d.conns[conn] = struct{}{}
	}
	d.mu.Unlock()
	if isClosed {
		conn.Close()
		return nil, net.ErrClosed
	}
	return conn, nil
}

func (d *dialer) remove(conn net.Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.conns, conn)
}

func (d *dialer) setLastAddress(address string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.last = address
}

// lastAddress returns the address to which a connection was last tried; "": none yet.
func (d *dialer) lastAddress() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// closeAll closes all connections, and has none made any more.
func (d *dialer) closeAll() {
	d.close()
	d.mu.Lock()
	open := make([]net.Conn, 0, len(d.conns))
	for conn := range d.conns {
		open = append(open, conn)
	}
	d.mu.Unlock()
	for _, conn := range open {
		conn.Close()
	}
}
