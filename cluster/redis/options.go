package redis

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// The values of Options.Mode.
const (
	ModeSingle   = "single"
	ModeSentinel = "sentinel"
	ModeCluster  = "cluster"
)

const (
	// defaultDialTimeout bounds a connection and its TLS handshake. A lost first packet is repeated after a second only.
	defaultDialTimeout = 800 * time.Millisecond
	// defaultReadTimeout bounds a command; ReadStream takes the time for which it blocks longer.
	defaultReadTimeout = time.Second
	// defaultSentinelTimeout bounds a command to a sentinel. The library sends two to the sentinel that answered last, and then
	// one to all sentinels, before it connects: a sentinel that hangs must not delay that by more than 3 s.
	defaultSentinelTimeout = 400 * time.Millisecond
	// defaultPoolSize is more than the connections that are used at once. The library asks no server any more, for a second,
	// when as many connections in turn have failed.
	defaultPoolSize = 16
	// defaultConnectionLifetime is how long a connection is used. Then the name of the server, or the sentinels, are asked
	// again: a server that was replaced, and does not know it, is left.
	defaultConnectionLifetime = 5 * time.Second
	// topologyInterval is how often the nodes of a Redis Cluster are read.
	topologyInterval = 2 * time.Second

	minPoolSize, maxPoolSize = 4, 1 << 10
	maxBufferBytes           = 16 << 20
	maxTries                 = 16 // of a command or a connection
	maxTimeout               = time.Minute
)

// What a URL without them means.
const (
	defaultHost = "localhost"
	defaultPort = "6379"
)

// Options are what a Client is made of. URL, Mode and Log are required.
type Options struct {
	URL      string
	Mode     string
	Password string // in place of the URL's
	CA       string // for rediss: PEM; empty: the system's authorities
	CAFile   string // where CA was read
	Log      *slog.Logger
}

// options are Options that were parsed. One of single, sentinel and cluster is set.
type options struct {
	single   *goredis.Options
	sentinel *goredis.FailoverOptions
	cluster  *goredis.ClusterOptions

	tls         *tls.Config // nil: without TLS
	hosts       []string    // that the URL names
	dialTimeout time.Duration
	readTimeout time.Duration // of commands, not of what sentinels are asked
}

// CheckOptions returns why a Client cannot be made of the options. It is about Options.URL, which it does not show.
func CheckOptions(o Options) error {
	_, err := o.parse()
	return err
}

func (o *Options) parse() (*options, error) {
	u, err := url.Parse(o.URL)
	if err != nil { // its text has the URL, and so the password
		return nil, errors.New("is not a valid URL; expected one such as " + o.urlForm())
	}
	parsed, err := o.parseURL(u)
	if err != nil {
		return nil, fmt.Errorf("%w; expected a URL such as %s", err, o.urlForm())
	}
	return parsed, o.setCA(parsed.tls)
}

// urlForm returns an example of a URL for the mode.
func (o *Options) urlForm() string {
	switch o.Mode {
	case ModeSentinel:
		return "redis://sentinel:26379?master_name=mymaster&addr=sentinel2:26379"
	case ModeCluster:
		return "redis://host:6379?addr=host2:6379"
	}
	return "redis://host:6379, or rediss:// for TLS"
}

func (o *Options) parseURL(u *url.URL) (*options, error) {
	p, query := &options{}, u.Query()
	switch {
	case u.Scheme == "redis":
	case u.Scheme == "rediss":
		p.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		if value := query.Get("skip_verify"); value != "" {
			var err error
			if p.tls.InsecureSkipVerify, err = strconv.ParseBool(value); err != nil {
				return nil, errors.New("skip_verify is neither true nor false")
			}
		}
		query.Del("skip_verify")
	case u.Scheme == "unix" && o.Mode == ModeSingle:
	default:
		return nil, fmt.Errorf("invalid URL scheme %q", u.Scheme)
	}
	if err := o.setDatabase(u, query); err != nil {
		return nil, err
	}
	p.hosts = []string{cmp.Or(u.Hostname(), defaultHost)}
	for _, address := range query["addr"] {
		host, port, err := net.SplitHostPort(address)
		if err != nil || host == "" || port == "" {
			return nil, errors.New("addr is not a host and a port")
		}
		p.hosts = append(p.hosts, host)
	}
	u.RawQuery = query.Encode()
	return p, o.parseForLibrary(p, u.String())
}

// setDatabase moves the number of the database to where the library expects it.
func (o *Options) setDatabase(u *url.URL, query url.Values) error {
	text := query.Get("db")
	if u.Scheme != "unix" {
		text = cmp.Or(text, strings.Trim(u.Path, "/"))
		u.Path = ""
	}
	n, err := strconv.Atoi(cmp.Or(text, "0"))
	if err != nil || n < 0 || n > 0 && o.Mode == ModeCluster {
		return errors.New("invalid number of a database")
	}
	query.Del("db")
	if n > 0 {
		query.Set("db", strconv.Itoa(n))
	}
	return nil
}

// parseForLibrary has the library parse the URL, and sets what it does not say.
func (o *Options) parseForLibrary(p *options, text string) (err error) {
	switch o.Mode {
	case ModeSentinel:
		if p.sentinel, err = goredis.ParseFailoverURL(text); err == nil {
			return o.completeSentinelOptions(p, p.sentinel)
		}
	case ModeCluster:
		if p.cluster, err = goredis.ParseClusterURL(text); err == nil {
			return o.completeClusterOptions(p, p.cluster)
		}
	default:
		if p.single, err = goredis.ParseURL(text); err == nil {
			return o.completeSingleOptions(p, p.single)
		}
	}
	return libraryError(err)
}

func (o *Options) completeSingleOptions(p *options, l *goredis.Options) error {
	l.MaintNotificationsConfig = noNotifications()
	l.DisableIdentity = l.IdentitySuffix == ""
	p.readTimeout = cmp.Or(l.ReadTimeout, defaultReadTimeout)
	return o.completeCommonOptions(p, common{
		&l.Password, &l.TLSConfig, &l.ContextTimeoutEnabled, &l.DialTimeout, &l.ReadTimeout, &l.WriteTimeout, &l.ConnMaxLifetime,
		&l.Protocol, &l.MaxRetries, &l.DialerRetries, &l.PoolSize, &l.PipelinePoolSize,
		[]int{l.MinIdleConns, l.MaxIdleConns, l.MaxActiveConns, l.MaxConcurrentDials},
		[]int{l.PipelineReadBufferSize, l.PipelineWriteBufferSize},
	})
}

func (o *Options) completeSentinelOptions(p *options, l *goredis.FailoverOptions) error {
	switch {
	case l.MasterName == "":
		return errors.New("has no master_name")
	case l.ReplicaOnly || l.RouteByLatency || l.RouteRandomly || l.UseDisconnectedReplicas:
		return errReadsReplicas
	}
	l.DisableIdentity = l.IdentitySuffix == ""
	p.readTimeout = cmp.Or(l.ReadTimeout, defaultReadTimeout)
	l.ReadTimeout = cmp.Or(l.ReadTimeout, defaultSentinelTimeout)
	err := o.completeCommonOptions(p, common{
		&l.Password, &l.TLSConfig, &l.ContextTimeoutEnabled, &l.DialTimeout, &l.ReadTimeout, &l.WriteTimeout, &l.ConnMaxLifetime,
		&l.Protocol, &l.MaxRetries, &l.DialerRetries, &l.PoolSize, &l.PipelinePoolSize,
		[]int{l.MinIdleConns, l.MaxIdleConns, l.MaxActiveConns, l.MaxConcurrentDials},
		[]int{l.PipelineReadBufferSize, l.PipelineWriteBufferSize},
	})
	l.DialTimeout += 3 * l.ReadTimeout // the sentinels are asked first
	return err
}

func (o *Options) completeClusterOptions(p *options, l *goredis.ClusterOptions) error {
	switch {
	case l.ReadOnly || l.RouteByLatency || l.RouteRandomly:
		return errReadsReplicas
	case l.MaxRedirects > maxTries:
		return fmt.Errorf("max_redirects is above %d", maxTries)
	}
	l.MaintNotificationsConfig = noNotifications()
	l.DisableIdentity, l.DisableRoutingPolicies, l.ClusterStateReloadInterval = true, true, topologyInterval
	p.readTimeout = cmp.Or(l.ReadTimeout, defaultReadTimeout)
	return o.completeCommonOptions(p, common{
		&l.Password, &l.TLSConfig, &l.ContextTimeoutEnabled, &l.DialTimeout, &l.ReadTimeout, &l.WriteTimeout, &l.ConnMaxLifetime,
		&l.Protocol, &l.MaxRetries, &l.DialerRetries, &l.PoolSize, &l.PipelinePoolSize,
		[]int{l.MinIdleConns, l.MaxIdleConns, l.MaxActiveConns, l.MaxConcurrentDials},
		[]int{l.PipelineReadBufferSize, l.PipelineWriteBufferSize},
	})
}

// noNotifications turns off what the library asks for on each connection, and only Redis Enterprise has.
func noNotifications() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

var errReadsReplicas = errors.New("reads replicas (read_only, replica_only, use_disconnected_replicas, route_by_latency or " +
	"route_randomly): remove the parameter, since they do not have the latest messages")

// libraryError returns the error of the library for a URL as one of ours.
func libraryError(err error) error {
	text := strings.TrimPrefix(err.Error(), "redis: ")
	if names, ok := strings.CutPrefix(text, "unexpected option: "); ok {
		name, _, _ := strings.Cut(names, ", ")
		return fmt.Errorf("unknown parameter %q: remove it; docs/deploy/proxies.md lists the parameters", name)
	}
	return errors.New(text)
}

// common points to the settings that the library has for each mode.
type common struct {
	password                                                    *string
	tls                                                         **tls.Config
	hasContextTimeouts                                          *bool
	dialTimeout, readTimeout, writeTimeout, connectionLifetime  *time.Duration
	protocol, maxRetries, dialerRetries, poolSize, pipelineSize *int
	connections, bufferBytes                                    []int // numbers and sizes that are checked only
}

// completeCommonOptions sets what the URL does not say, and checks what it says: the library panics at sizes beyond 32 bits.
func (o *Options) completeCommonOptions(p *options, c common) error {
	*c.password = cmp.Or(o.Password, *c.password)
	*c.tls, *c.hasContextTimeouts = nil, true // the dialer has the one
	*c.dialTimeout = cmp.Or(*c.dialTimeout, defaultDialTimeout)
	*c.readTimeout = cmp.Or(*c.readTimeout, defaultReadTimeout)
	*c.writeTimeout = cmp.Or(*c.writeTimeout, p.readTimeout)
	*c.connectionLifetime = cmp.Or(*c.connectionLifetime, defaultConnectionLifetime)
	*c.protocol = cmp.Or(*c.protocol, 2)
	*c.maxRetries = cmp.Or(*c.maxRetries, -1) // the next command is the retry
	*c.dialerRetries = cmp.Or(*c.dialerRetries, 1)
	*c.poolSize = cmp.Or(*c.poolSize, defaultPoolSize)
	*c.pipelineSize = cmp.Or(*c.pipelineSize, -1) // the same connections
	p.dialTimeout = *c.dialTimeout
	for _, timeout := range []time.Duration{*c.dialTimeout, *c.readTimeout, *c.writeTimeout} {
		if timeout <= 0 || timeout > maxTimeout {
			return fmt.Errorf("dial_timeout, read_timeout or write_timeout is not above 0 and at most %v", maxTimeout)
		}
	}
	switch {
	case *c.protocol != 2 && *c.protocol != 3:
		return errors.New("protocol is neither 2 nor 3")
	case *c.poolSize < minPoolSize || *c.poolSize > maxPoolSize:
		return fmt.Errorf("pool_size is not between %d and %d", minPoolSize, maxPoolSize)
	case *c.maxRetries > maxTries || *c.dialerRetries > maxTries:
		return fmt.Errorf("max_retries or dialer_retries is above %d", maxTries)
	case *c.pipelineSize > maxPoolSize:
		return fmt.Errorf("pipeline_pool_size is above %d", maxPoolSize)
	}
	for _, n := range c.connections {
		if n < 0 || n > maxPoolSize {
			return fmt.Errorf("a number of connections is not between 0 and %d", maxPoolSize)
		}
	}
	for _, n := range c.bufferBytes {
		if n < 0 || n > maxBufferBytes {
			return fmt.Errorf("the size of a buffer is not between 0 and %d", maxBufferBytes)
		}
	}
	return nil
}

func (o *Options) setCA(c *tls.Config) error {
	switch {
	case o.CA == "":
		return nil
	case c == nil:
		return errors.New("does not begin with rediss://, but redis.ca_file is given; change one of the two")
	}
	c.RootCAs = x509.NewCertPool()
	if !c.RootCAs.AppendCertsFromPEM([]byte(o.CA)) {
		return fmt.Errorf("%s contains no certificate; expected PEM, beginning with -----BEGIN CERTIFICATE-----", o.CAFile)
	}
	return nil
}

// newLibraryClient returns a client of the library, which connects with d when it is used. After ignoresQuorumUntil, sentinels
// that do not see the majority of the sentinels are not believed.
func (p *options) newLibraryClient(d *dialer, ignoresQuorumUntil time.Time) goredis.UniversalClient {
	switch {
	case p.sentinel != nil:
		o := *p.sentinel
		o.Dialer = d.dial
		o.OnConnect = func(ctx context.Context, conn *goredis.Conn) error {
			return checkSentinel(ctx, conn, &o, time.Now().Before(ignoresQuorumUntil))
		}
		return goredis.NewFailoverClient(&o).WithTimeout(p.readTimeout)
	case p.cluster != nil:
		o := *p.cluster
		o.Dialer = d.dial
		return goredis.NewClusterClient(&o)
	}
	o := *p.single
	o.Dialer = d.dial
	return goredis.NewClient(&o)
}

var (
	errNoQuorum  = errors.New("sentinel does not see the majority of the sentinels: the master that it names may have been replaced")
	errNoMaster  = errors.New("no sentinel knows the master: check master_name in redis.url")
	errNoAddress = errors.New("sentinel names a master without an address")
)

// checkSentinel fails at a connection to a sentinel that does not know the master, whose address the library takes as it is, or,
// unless ignoresQuorum is set, that does not see the majority of the sentinels. Such a one is on one side of a partition, perhaps
// with a server that takes itself for the master while another one was elected on the other side.
func checkSentinel(ctx context.Context, conn *goredis.Conn, o *goredis.FailoverOptions, ignoresQuorum bool) error {
	role, err := conn.Do(ctx, "ROLE").Slice()
	if err != nil || len(role) == 0 || role[0] != "sentinel" {
		return unlessReply(err) // of the master; a user may lack the permission to ask
	}
	address, err := conn.Do(ctx, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", o.MasterName).StringSlice()
	switch {
	case err == goredis.Nil:
		return errNoMaster
	case err != nil:
		return err
	case len(address) != 2:
		return errNoAddress
	}
	if ignoresQuorum {
		return nil
	}
	reply, err := conn.Do(ctx, "SENTINEL", "CKQUORUM", o.MasterName).Text()
	if err != nil {
		if goredis.HasErrorPrefix(err, "NOQUORUM") {
			return errNoQuorum
		}
		return unlessReply(err)
	}
	usable, isNumber := 0, false
	if fields := strings.Fields(reply); len(fields) > 1 { // OK 3 usable Sentinels. Quorum and ...
		usable, err = strconv.Atoi(fields[1])
		isNumber = err == nil
	}
	if isNumber && usable <= len(o.SentinelAddrs)/2 { // it knows fewer than the URL
		return errNoQuorum
	}
	return nil
}

// unlessReply returns err, or nil if it is a reply: after another error the connection is of no use.
func unlessReply(err error) error {
	if reply := (goredis.Error)(nil); errors.As(err, &reply) {
		return nil
	}
	return err
}
