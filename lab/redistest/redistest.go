// Package redistest starts redis-server processes for tests: single servers, sentinels and clusters, and puts them behind
// addresses that move.
package redistest

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"warmroute/lab/freeport"
)

// Server is a redis-server process, which is killed at the end of the test.
type Server struct {
	t       testing.TB
	network string
	args    []string
	cmd     *exec.Cmd

	Address  string      // a path or a host and a port
	TLS      *tls.Config // of Do
	Password string      // of Do
}

// Start starts a server on a Unix socket, without a disk.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "redis.sock")
	s := &Server{t: t, network: "unix", Address: socket, args: append([]string{"--port", "0", "--unixsocket", socket, "--save", ""}, args...)}
	s.Restart()
	return s
}

// StartAt starts a server at a host and a port, without a disk.
func StartAt(t testing.TB, address string, args ...string) *Server {
	t.Helper()
	s := StartProcess(t, address, append(listenArgs(address), args...)...)
	s.AwaitReply()
	return s
}

func listenArgs(address string) []string {
	host, port, _ := net.SplitHostPort(address)
	return []string{"--bind", host, "--port", port, "--save", ""}
}

// StartProcess starts redis-server with these arguments, and does not wait for its first reply.
func StartProcess(t testing.TB, address string, args ...string) *Server {
	t.Helper()
	s := &Server{t: t, network: "tcp", Address: address, args: args}
	s.start()
	return s
}

// Restart starts a server that was killed, or its first process.
func (s *Server) Restart(args ...string) {
	s.t.Helper()
	s.start(args...)
	s.AwaitReply()
}

func (s *Server) start(args ...string) {
	s.t.Helper()
	all := slices.Concat(s.args, args)
	if !slices.Contains(all, "--dir") {
		all = append(all, "--dir", s.t.TempDir())
	}
	s.cmd = exec.Command("redis-server", all...)
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	cmd := s.cmd
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
}

// AwaitReply waits until the server replies to anything.
func (s *Server) AwaitReply() {
	s.t.Helper()
	Eventually(s.t, s.Address+" replies", func() bool {
		_, err := s.TryDo("PING")
		return err == nil || strings.Contains(err.Error(), "NOAUTH")
	})
}

// TryDo sends a command over a connection of its own.
func (s *Server) TryDo(args ...any) (any, error) {
	client := redis.NewClient(&redis.Options{
		Network: s.network, Addr: s.Address, Password: s.Password, TLSConfig: s.TLS, Protocol: 2, DisableIdentity: true,
		MaxRetries: -1, DialerRetries: 1, PoolSize: 2, DialTimeout: 5 * time.Second, ReadTimeout: time.Minute,
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
	defer client.Close()
	return client.Do(context.Background(), args...).Result()
}

// Do is TryDo for a command that succeeds.
func (s *Server) Do(args ...any) any {
	s.t.Helper()
	reply, err := s.TryDo(args...)
	if err != nil {
		s.t.Fatal(err)
	}
	return reply
}

// Kill kills the process and waits for its end.
func (s *Server) Kill() {
	s.cmd.Process.Kill()
	s.cmd.Wait()
}

// Signal sends a signal to the process.
func (s *Server) Signal(signal syscall.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(signal); err != nil {
		s.t.Fatal(err)
	}
}

// Eventually waits until is returns true, and fails after a minute.
func Eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

// Watched is a master with a replica and the sentinels that watch them.
type Watched struct {
	t               testing.TB
	Master, Replica *Server
	Sentinels       []*Server
}

// MasterName is the name of the master that sentinels watch.
const MasterName = "mymaster"

// StartWatched starts a master, a replica and three sentinels, which know each other. The servers want a password if it is
// not empty.
func StartWatched(t testing.TB, password string) *Watched {
	t.Helper()
	addresses := freeport.FindAddresses(t, 5)
	var auth []string
	if password != "" {
		auth = []string{"--requirepass", password, "--masterauth", password}
	}
	host, port, _ := net.SplitHostPort(addresses[0])
	w := &Watched{t: t, Master: StartAt(t, addresses[0], auth...)}
	w.Replica = StartAt(t, addresses[1], append(auth, "--replicaof", host, port)...)
	w.Master.Password, w.Replica.Password = password, password
	Eventually(t, "the replica is connected", func() bool {
		return strings.Contains(w.Replica.Do("INFO", "replication").(string), "master_link_status:up")
	})
	for _, address := range addresses[2:] {
		w.Sentinels = append(w.Sentinels, StartSentinel(t, address, w.Master.Address, password))
	}
	for _, s := range w.Sentinels {
		Eventually(t, "a sentinel knows all", func() bool {
			reply, err := s.TryDo("SENTINEL", "CKQUORUM", MasterName)
			replicas, failed := s.TryDo("SENTINEL", "REPLICAS", MasterName)
			return err == nil && failed == nil && strings.HasPrefix(fmt.Sprint(reply), "OK 3 ") && len(replicas.([]any)) == 1
		})
	}
	return w
}

// StartSentinel starts a sentinel that watches a master, of two that have to agree.
func StartSentinel(t testing.TB, address, master, password string) *Server {
	t.Helper()
	host, port, _ := net.SplitHostPort(address)
	masterHost, masterPort, _ := net.SplitHostPort(master)
	lines := fmt.Sprintf("bind %s\nport %s\nsentinel monitor %s %s %s 2\nsentinel down-after-milliseconds %[3]s 1000\n",
		host, port, MasterName, masterHost, masterPort)
	if password != "" {
		lines += fmt.Sprintf("sentinel auth-pass %s %s\n", MasterName, password)
	}
	file := filepath.Join(t.TempDir(), "sentinel.conf")
	if err := os.WriteFile(file, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	s := StartProcess(t, address, file, "--sentinel")
	s.AwaitReply()
	return s
}

// URL returns the URL of some of the sentinels, or of all.
func (w *Watched) URL(sentinels ...string) string {
	if len(sentinels) == 0 {
		for _, s := range w.Sentinels {
			sentinels = append(sentinels, s.Address)
		}
	}
	url := "redis://" + sentinels[0] + "?master_name=" + MasterName
	for _, address := range sentinels[1:] {
		url += "&addr=" + address
	}
	return url
}

// AwaitMaster waits until all sentinels name a server as the master.
func (w *Watched) AwaitMaster(s *Server) {
	w.t.Helper()
	for _, sentinel := range w.Sentinels {
		Eventually(w.t, "a sentinel names "+s.Address, func() bool {
			reply, err := sentinel.TryDo("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MasterName)
			address, ok := reply.([]any)
			return err == nil && ok && net.JoinHostPort(fmt.Sprint(address[0]), fmt.Sprint(address[1])) == s.Address
		})
	}
}

// StartCluster starts the nodes of a Redis Cluster, which have the slots in equal parts, at 127.0.0.1 and the next addresses.
// args returns further arguments of a node.
func StartCluster(t testing.TB, nodes int, tlsConfig *tls.Config, args func(node int) []string) []*Server {
	t.Helper()
	const slots = 1 << 14
	ports := freeport.FindPorts(t, 2*nodes) // the second half is for the cluster's own connections
	portArg := "--port"
	if tlsConfig != nil {
		portArg = "--tls-port"
	}
	var servers []*Server
	for i := range nodes {
		host := fmt.Sprintf("127.0.0.%d", i+1)
		all := []string{"--port", "0", "--bind", host, portArg, ports[i], "--cluster-enabled", "yes", "--cluster-port", ports[nodes+i],
			"--cluster-announce-ip", host, "--bind-source-addr", host, "--save", ""}
		s := StartProcess(t, net.JoinHostPort(host, ports[i]), append(all, args(i)...)...)
		s.TLS = tlsConfig
		s.AwaitReply()
		s.Do("CLUSTER", "ADDSLOTSRANGE", i*slots/nodes, (i+1)*slots/nodes-1)
		servers = append(servers, s)
	}
	for i, s := range servers[1:] {
		host, port, _ := net.SplitHostPort(s.Address)
		servers[0].Do("CLUSTER", "MEET", host, port, ports[nodes+i+1])
	}
	for _, s := range servers {
		Eventually(t, "the nodes have all slots", func() bool {
			info := s.Do("CLUSTER", "INFO").(string)
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_known_nodes:%d", nodes))
		})
	}
	return servers
}

// Address is an address that leads to a server, as a name or a virtual IP address does. When it moves, connections stay with
// the server to which they were made.
type Address struct {
	listener net.Listener
	mu       sync.Mutex
	target   string
}

// NewAddress returns an address that leads to a server.
func NewAddress(t testing.TB, target string) *Address {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	a := &Address{listener: l, target: target}
	var running sync.WaitGroup
	running.Go(func() { a.accept(&running) })
	t.Cleanup(func() {
		l.Close()
		running.Wait()
	})
	return a
}

func (a *Address) String() string { return a.listener.Addr().String() }

// Move has new connections go to another server.
func (a *Address) Move(target string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.target = target
}

func (a *Address) accept(running *sync.WaitGroup) {
	for {
		client, err := a.listener.Accept()
		if err != nil {
			return
		}
		a.mu.Lock()
		target := a.target
		a.mu.Unlock()
		server, err := net.Dial("tcp", target)
		if err != nil {
			client.Close()
			continue
		}
		for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
			running.Go(func() {
				io.Copy(pair[0], pair[1])
				pair[0].Close()
				pair[1].Close()
			})
		}
	}
}

// DroppingAddress returns an address of this machine that drops packets: a connection is neither made nor refused.
func DroppingAddress(t testing.TB) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	bound, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)
	for { // until the queue of connections that wait to be accepted is full
		conn, err := net.DialTimeout("tcp", address, 200*time.Millisecond)
		if err != nil {
			return address
		}
		t.Cleanup(func() { conn.Close() })
	}
}
