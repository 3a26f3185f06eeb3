//go:build redis

package redis

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"warmroute/lab/freeport"
	"warmroute/lab/redistest"
)

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// awaitWrite writes a value until that succeeds. It fails if that takes longer than most.
func awaitWrite(t *testing.T, c *Client, key string, most time.Duration) {
	t.Helper()
	began := time.Now()
	for {
		_, err := c.WriteValue(t.Context(), key, []byte("x"), time.Minute, false)
		passed := time.Since(began)
		if err == nil {
			t.Logf("%s is written within %v", key, passed.Round(time.Millisecond))
		}
		if passed > most {
			t.Fatalf("%s is not written within %v: %v", key, most, err)
		}
		if err == nil {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// has reports whether a server has a key.
func has(s *redistest.Server, key string) bool { return s.Do("EXISTS", key).(int64) == 1 }

// The client uses another sentinel when one is stopped, also the one that answered it last.
func TestStoppedSentinel(t *testing.T) {
	w := redistest.StartWatched(t, "secret")
	for i, stopped := range w.Sentinels {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			connected := newClient(t, Options{Mode: ModeSentinel, URL: w.URL(), Password: "secret"})
			awaitWrite(t, connected, "before", 3*time.Second)
			stopped.Signal(syscall.SIGSTOP)
			defer stopped.Signal(syscall.SIGCONT)
			w.Master.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			awaitWrite(t, connected, "after", 3*time.Second)
			awaitWrite(t, newClient(t, Options{Mode: ModeSentinel, URL: w.URL(), Password: "secret"}), "new", 3*time.Second)
		})
	}
}

func TestSentinelDropsPackets(t *testing.T) {
	w := redistest.StartWatched(t, "")
	dropping := redistest.DroppingAddress(t)
	for _, addresses := range [][]string{
		{dropping, w.Sentinels[0].Address, w.Sentinels[1].Address},
		{w.Sentinels[0].Address, w.Sentinels[1].Address, dropping},
	} {
		awaitWrite(t, newClient(t, Options{Mode: ModeSentinel, URL: w.URL(addresses...)}), "k", 3*time.Second)
	}
}

// A sentinel on the other side of a partition answers as fast as the others, and so does the server that it takes for the
// master.
func TestPartitionedSentinel(t *testing.T) {
	w := redistest.StartWatched(t, "")
	addresses := freeport.FindAddresses(t, 2)
	stale := redistest.StartAt(t, addresses[0])
	partitioned := redistest.StartSentinel(t, addresses[1], stale.Address, "")
	url := w.URL(partitioned.Address, w.Sentinels[0].Address, w.Sentinels[1].Address)
	for i := range 10 {
		key := fmt.Sprint("key ", i)
		awaitWrite(t, newClient(t, Options{Mode: ModeSentinel, URL: url}), key, 3*time.Second)
		if has(stale, key) || !has(w.Master, key) {
			t.Errorf("%s: the stale master has it: %v", key, has(stale, key))
		}
	}
	// Where no sentinel has a majority, the master that one knows is the best guess.
	url = w.URL(partitioned.Address, redistest.DroppingAddress(t), freeport.FindAddress(t))
	awaitWrite(t, newClient(t, Options{Mode: ModeSentinel, URL: url}), "guess", 3*time.Second)
	if !has(stale, "guess") {
		t.Error("the only master that is named does not have the value")
	}
	// A proxy that starts does not try to load a snapshot twice.
	free := freeport.FindAddresses(t, 2)
	first := newClient(t, Options{Mode: ModeSentinel, URL: w.URL(partitioned.Address, free[0], free[1])})
	if _, err := first.ReadValues(t.Context(), []string{"guess"}, 100); err != nil {
		t.Error(err)
	}
}

// The sentinel that the library remembers hangs together with the master.
func TestRememberedSentinelHangsWithMaster(t *testing.T) {
	w := redistest.StartWatched(t, "")
	var c *Client
	for subscribed := false; !subscribed; { // to the sentinel that announces a new master
		c = newClient(t, Options{Mode: ModeSentinel, URL: w.URL()})
		awaitWrite(t, c, "before", 3*time.Second)
		subscribed = strings.Contains(w.Sentinels[0].Do("CLIENT", "LIST").(string), " sub=2 ")
	}
	w.Master.Signal(syscall.SIGSTOP) // it and a sentinel hang while another master is elected
	w.Sentinels[0].Signal(syscall.SIGSTOP)
	for _, s := range w.Sentinels[1:] {
		redistest.Eventually(t, "the replica is elected", func() bool {
			reply, err := s.TryDo("SENTINEL", "GET-MASTER-ADDR-BY-NAME", redistest.MasterName)
			return err == nil && strings.Contains(w.Replica.Address, fmt.Sprint(reply.([]any)[1]))
		})
	}
	awaitWrite(t, c, "after", 10*time.Second)
	if !has(w.Replica, "after") {
		t.Error("the new master does not have the value")
	}
}

func TestFailover(t *testing.T) {
	w := redistest.StartWatched(t, "secret")
	c := newClient(t, Options{Mode: ModeSentinel, URL: w.URL(), Password: "secret"})
	awaitWrite(t, c, "before", 3*time.Second)
	w.Master.Kill()
	w.AwaitMaster(w.Replica)
	awaitWrite(t, c, "after", 5*time.Second)
	if !has(w.Replica, "after") {
		t.Error("the new master does not have the value")
	}
}

// movedServers are a server that an address led to, and its successor.
type movedServers struct {
	old, successor *redistest.Server
	address        *redistest.Address
	log            lockedBuffer
	client         *Client
}

func startMoved(t *testing.T, args ...string) *movedServers {
	t.Helper()
	addresses := freeport.FindAddresses(t, 2)
	m := &movedServers{old: redistest.StartAt(t, addresses[0], args...), successor: redistest.StartAt(t, addresses[1])}
	m.address = redistest.NewAddress(t, m.old.Address)
	m.client = newClient(t, Options{URL: "redis://" + m.address.String() + "?read_timeout=1m",
		Log: slog.New(slog.NewTextHandler(&m.log, nil))})
	return m
}

// awaitReads waits until the client reads from the successor, in the time that it has.
func (m *movedServers) awaitReads(t *testing.T) {
	t.Helper()
	m.successor.Do("SET", "of the successor", "x")
	end := time.Now().Add(10 * time.Second)
	for {
		values, err := m.client.ReadValues(t.Context(), []string{"of the successor"}, 10)
		if err == nil && len(values[0]) > 0 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the successor is not read: %v", err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (m *movedServers) expectReason(t *testing.T, reason string) {
	t.Helper()
	if log := m.log.String(); !strings.Contains(log, "redis refuses commands, connecting again") || !strings.Contains(log, reason) {
		t.Errorf("the log does not name the reason %s:\n%s", reason, log)
	}
}

func TestAddressMovesFromDemotedServer(t *testing.T) {
	m := startMoved(t)
	var reading sync.WaitGroup
	for range 2 { // connections, of which only one has an error that would close it
		reading.Go(func() { m.client.ReadStream(t.Context(), "stream", "0", "m", 1, 500*time.Millisecond) })
	}
	reading.Wait()
	host, port, _ := net.SplitHostPort(freeport.FindAddress(t))
	m.address.Move(m.successor.Address)
	m.old.Do("REPLICAOF", host, port)
	awaitWrite(t, m.client, "after", 10*time.Second)
	m.awaitReads(t)
	m.expectReason(t, "READONLY")
}

func TestAddressMovesFromServerWithoutMaster(t *testing.T) {
	m := startMoved(t, "--replica-serve-stale-data", "no")
	m.awaitOld(t)
	host, port, _ := net.SplitHostPort(freeport.FindAddress(t))
	m.old.Do("REPLICAOF", host, port)
	m.awaitError(t, "MASTERDOWN")
	m.address.Move(m.successor.Address)
	m.awaitReads(t)
	m.expectReason(t, "MASTERDOWN")
}

// A server that loads its data for long keeps its connections.
func TestAddressMovesFromLoadingServer(t *testing.T) {
	first := redistest.Start(t, "--dbfilename", "dump.rdb")
	dir := first.Do("CONFIG", "GET", "dir").([]any)[1].(string)
	first.Do("EVAL", "for i = 1, 3000 do redis.call('SET', i, string.rep('x', 1000)) end return 1", 0)
	first.Do("SAVE")
	first.Kill()
	addresses := freeport.FindAddresses(t, 2)
	host, port, _ := net.SplitHostPort(addresses[0])
	redistest.StartProcess(t, addresses[0], "--bind", host, "--port", port, "--save", "", "--dir", dir, "--dbfilename", "dump.rdb",
		"--key-load-delay", "20000", "--loading-process-events-interval-bytes", "1024")
	m := &movedServers{successor: redistest.StartAt(t, addresses[1]), address: redistest.NewAddress(t, addresses[0])}
	m.client = newClient(t, Options{URL: "redis://" + m.address.String() + "?read_timeout=1m",
		Log: slog.New(slog.NewTextHandler(&m.log, nil))})
	m.awaitError(t, "LOADING")
	m.address.Move(m.successor.Address)
	awaitWrite(t, m.client, "after", 10*time.Second)
	m.awaitReads(t)
	m.expectReason(t, "LOADING")
}

func (m *movedServers) awaitOld(t *testing.T) {
	t.Helper()
	awaitWrite(t, m.client, "before", 3*time.Second)
}

// awaitError waits until reads fail with a reason.
func (m *movedServers) awaitError(t *testing.T, reason string) {
	t.Helper()
	redistest.Eventually(t, "reads fail with "+reason, func() bool {
		_, err := m.client.ReadValues(t.Context(), []string{"k"}, 10)
		return err != nil && strings.Contains(err.Error(), reason)
	})
}

// A command of a server that is stopped ends with its context.
func TestStoppedServer(t *testing.T) {
	for _, protocol := range []string{"2", "3"} {
		s := redistest.StartAt(t, freeport.FindAddress(t))
		c := newClient(t, Options{URL: "redis://" + s.Address + "?protocol=" + protocol})
		awaitWrite(t, c, "k", 3*time.Second)
		s.Signal(syscall.SIGSTOP)
		for name, f := range map[string]func(context.Context) error{
			"AppendToStream": func(ctx context.Context) error { return c.AppendToStream(ctx, "s", 10, "m", nil) },
			"ReadStream": func(ctx context.Context) error {
				_, _, err := c.ReadStream(ctx, "s", "0", "m", 1, time.Minute)
				return err
			},
			"ReadValues":   func(ctx context.Context) error { _, err := c.ReadValues(ctx, []string{"k"}, 10); return err },
			"WriteValue":   func(ctx context.Context) error { _, err := c.WriteValue(ctx, "k", nil, time.Minute, true); return err },
			"DeleteValues": func(ctx context.Context) error { return c.DeleteValues(ctx, []string{"k"}) },
			"ReadHash":     func(ctx context.Context) error { _, err := c.ReadHash(ctx, "h", 10); return err },
			"UpdateHash":   func(ctx context.Context) error { return c.UpdateHash(ctx, "h", []any{"f", "v"}, nil) },
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if err := f(ctx); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, want its deadline", name, err)
			}
			cancel()
			ctx, cancel = context.WithCancel(t.Context())
			time.AfterFunc(20*time.Millisecond, cancel)
			if err := f(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v, want its cancellation", name, err)
			}
		}
		s.Signal(syscall.SIGCONT)
		awaitWrite(t, c, "k", 5*time.Second)
	}
}

func TestStreams(t *testing.T) {
	for _, protocol := range []string{"2", "3"} {
		s := redistest.Start(t)
		c := newClient(t, Options{URL: "unix://" + s.Address + "?read_timeout=1m&protocol=" + protocol})
		if entries, areMore, err := c.ReadStream(t.Context(), "s", "0", "m", 2, 10*time.Millisecond); len(entries) > 0 || areMore || err != nil {
			t.Errorf("no stream: %v, %v, %v", entries, areMore, err)
		}
		for _, value := range []string{"1", "", "3"} {
			if err := c.AppendToStream(t.Context(), "s", 1000, "m", []byte(value)); err != nil {
				t.Fatal(err)
			}
		}
		s.Do("XADD", "s", "*", "other", "field")
		var values []string
		position := "0"
		for {
			entries, areMore, err := c.ReadStream(t.Context(), "s", position, "m", 2, 10*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				values, position = append(values, fmt.Sprintf("%q", e.Value)), e.ID
			}
			if !areMore {
				break
			}
		}
		if got := strings.Join(values, " "); got != `"1" "" "3" ""` {
			t.Errorf("protocol %s: the values are %s", protocol, got)
		}
		if isWritten, err := c.WriteValue(t.Context(), "k", []byte("v"), time.Minute, true); !isWritten || err != nil {
			t.Errorf("new value: %v, %v", isWritten, err)
		}
		if isWritten, err := c.WriteValue(t.Context(), "k", []byte("w"), time.Minute, true); isWritten || err != nil {
			t.Errorf("another value: %v, %v", isWritten, err)
		}
		if values, err := c.ReadValues(t.Context(), []string{"k", "none"}, 10); err != nil || fmt.Sprintf("%q", values) != `["v" ""]` {
			t.Errorf("%q, %v", values, err)
		}
	}
}

// Entries that are beyond the bounds are passed over one by one, and those between them are read.
func TestRefusedEntries(t *testing.T) {
	for _, protocol := range []string{"2", "3"} {
		s := redistest.Start(t)
		c := newClient(t, Options{URL: "unix://" + s.Address + "?read_timeout=1m&protocol=" + protocol})
		many := []any{"XADD", "s", "*"}
		for range maxReplyElements {
			many = append(many, "f", "v")
		}
		long := strings.Repeat("x", maxStringBytes+1)
		for i := range 4 {
			s.Do("XADD", "s", "*", "m", fmt.Sprint("honest ", i))
			s.Do(many...)
			s.Do("XADD", "s", "*", "m", long)
		}
		var honest []string
		refused, position := 0, "0"
		for areMore := true; areMore; {
			var entries []Entry
			var err error
			entries, areMore, err = c.ReadStream(t.Context(), "s", position, "m", 32, 10*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				position = e.ID
				if e.Err != nil {
					refused++
				} else {
					honest = append(honest, string(e.Value))
				}
			}
		}
		if got := strings.Join(honest, ", "); got != "honest 0, honest 1, honest 2, honest 3" || refused != 8 {
			t.Errorf("protocol %s: read %s; %d refused", protocol, got, refused)
		}
	}
}

// authority makes certificates.
type authority struct {
	t           testing.TB
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         string
}

func newAuthority(t testing.TB) *authority {
	a := &authority{t: t}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	var der []byte
	a.key, der = a.sign(template, template, nil)
	a.certificate, _ = x509.ParseCertificate(der)
	a.pem = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return a
}

func (a *authority) sign(template, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*ecdsa.PrivateKey, []byte) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	if parentKey == nil {
		parentKey = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, der
}

// serverArgs returns the arguments of a server that has a certificate for an IP address alone.
func (a *authority) serverArgs(ip string) []string {
	a.t.Helper()
	key, der := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), IPAddresses: []net.IP{net.ParseIP(ip)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.certificate, a.key)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	dir := a.t.TempDir()
	for name, content := range map[string][]byte{
		"cert": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		"key":  pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), "ca": []byte(a.pem),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			a.t.Fatal(err)
		}
	}
	return []string{
		"--tls-cert-file", filepath.Join(dir, "cert"), "--tls-key-file", filepath.Join(dir, "key"),
		"--tls-ca-cert-file", filepath.Join(dir, "ca"), "--tls-auth-clients", "no",
	}
}

// Each node of a cluster has a certificate for its own address; the URL names one of them.
func TestCertificatePerNode(t *testing.T) {
	a := newAuthority(t)
	roots := x509.NewCertPool()
	roots.AddCert(a.certificate)
	nodes := redistest.StartCluster(t, 3, &tls.Config{RootCAs: roots}, func(node int) []string {
		return append(a.serverArgs(fmt.Sprintf("127.0.0.%d", node+1)), "--tls-cluster", "yes")
	})
	c := newClient(t, Options{Mode: ModeCluster, URL: "rediss://" + nodes[0].Address, CA: a.pem, CAFile: "ca"})
	for i := range 20 {
		awaitWrite(t, c, fmt.Sprint("key ", i), 10*time.Second)
	}
	for _, node := range nodes {
		if node.Do("DBSIZE").(int64) == 0 {
			t.Errorf("%s has no key", node.Address)
		}
	}
}

func TestCertificates(t *testing.T) {
	a := newAuthority(t)
	port := freeport.FindPorts(t, 1)[0]
	redistest.Start(t, append(a.serverArgs("127.0.0.1"), "--tls-port", port, "--bind", "127.0.0.1", "127.0.0.2", "--requirepass", "secret")...)
	for _, c := range []struct{ url, ca, want string }{
		{"rediss://127.0.0.1:" + port, a.pem, ""},
		{"rediss://127.0.0.2:" + port, a.pem, "certificate is valid for 127.0.0.1, not 127.0.0.2"},
		{"rediss://127.0.0.2:" + port + "?skip_verify=true", "", ""},
		{"rediss://127.0.0.1:" + port, newAuthority(t).pem, "unknown authority"},
		{"rediss://127.0.0.1:" + port, "", "unknown authority"},
	} {
		url, query, _ := strings.Cut(c.url, "?")
		client := newClient(t, Options{URL: url + "?read_timeout=1m&dial_timeout=1m&" + query, CA: c.ca, CAFile: "ca", Password: "secret"})
		_, err := client.WriteValue(t.Context(), "k", nil, time.Minute, false)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want an error with %q", c.url, err, c.want)
		}
	}
	client := newClient(t, Options{
		URL: "rediss://127.0.0.1:" + port + "?read_timeout=1m&dial_timeout=1m", CA: a.pem, CAFile: "ca", Password: "guess",
	})
	_, err := client.WriteValue(t.Context(), "k", nil, time.Minute, false)
	if err == nil || !strings.Contains(err.Error(), "WRONGPASS") || strings.Contains(err.Error(), "guess") {
		t.Errorf("wrong password: %v", err)
	}
}

// A node of a cluster that is down does not stop what the others have.
func TestClusterNodes(t *testing.T) {
	nodes := redistest.StartCluster(t, 3, nil, func(int) []string { return []string{"--cluster-require-full-coverage", "no"} })
	c := newClient(t, Options{Mode: ModeCluster, URL: "redis://" + nodes[2].Address + "?addr=" + nodes[0].Address})
	var keys []string
	for i := range 30 {
		keys = append(keys, fmt.Sprint("key ", i))
		awaitWrite(t, c, keys[i], 10*time.Second)
	}
	values, err := c.ReadValues(t.Context(), keys, 10)
	if err != nil {
		t.Fatal(err)
	}
	for i, value := range values {
		if string(value) != "x" {
			t.Errorf("%s is %q", keys[i], value)
		}
	}
	if err := c.DeleteValues(t.Context(), keys); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		if n := node.Do("DBSIZE").(int64); n != 0 {
			t.Errorf("%s has %d keys", node.Address, n)
		}
	}
}
