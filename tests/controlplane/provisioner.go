package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
)

const (
	// provisionerName is what the storage classes name.
	provisionerName = "local.vm-operator.test"

	annProvisioner   = "volume.kubernetes.io/storage-provisioner"
	annSelectedNode  = "volume.kubernetes.io/selected-node"
	annProvisionedBy = "pv.kubernetes.io/provisioned-by"
)

// provisioner gives every claim of its classes a volume on the one node: a directory, or, for block claims, a
// sparse file on a loop device.
type provisioner struct {
	client  kubernetes.Interface
	dir     string
	node    string
	claims  cache.Indexer
	volumes cache.Indexer
	classes cache.Indexer

	mu sync.Mutex
	// The loop devices are held open for as long as the volume lives and detach themselves when nobody has them
	// open any more. So the kernel takes them away whichever way this process ends.
	loops map[string]*os.File
}

func newProvisionerCommand() *cobra.Command {
	var kubeconfig, dir, node string
	cmd := &cobra.Command{
		Use:   "local-provisioner",
		Short: "Provisions local volumes for the claims of a one-node cluster",
		RunE: func(cmd *cobra.Command, _ []string) error {
			config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
			if err != nil {
				return fmt.Errorf("reading %s: %w", kubeconfig, err)
			}
			client, err := kubernetes.NewForConfig(config)
			if err != nil {
				return err
			}
			p := &provisioner{client: client, dir: dir, node: node, loops: map[string]*os.File{}}
			return p.run(cmd.Context())
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "how to reach the API server")
	cmd.Flags().StringVar(&dir, "dir", "", "the directory that holds the volumes")
	cmd.Flags().StringVar(&node, "node", "node", "the name of the node")
	return cmd
}

func (p *provisioner) run(ctx context.Context) error {
	if ctx == nil {
		ctx = context.Background()
	}
	queue := workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](50*time.Millisecond, 5*time.Second))
	defer queue.ShutDown()
	enqueue := func(kind string) cache.ResourceEventHandlerFuncs {
		add := func(object any) {
			if key, err := cache.MetaNamespaceKeyFunc(object); err == nil {
				queue.Add(kind + ":" + key)
			}
		}
		return cache.ResourceEventHandlerFuncs{AddFunc: add, UpdateFunc: func(_, object any) { add(object) }}
	}

	factory := informers.NewSharedInformerFactory(p.client, 0)
	claims := factory.Core().V1().PersistentVolumeClaims().Informer()
	volumes := factory.Core().V1().PersistentVolumes().Informer()
	classes := factory.Storage().V1().StorageClasses().Informer()
	p.claims, p.volumes, p.classes = claims.GetIndexer(), volumes.GetIndexer(), classes.GetIndexer()
	if _, err := claims.AddEventHandler(enqueue("claim")); err != nil {
		return err
	}
	if _, err := volumes.AddEventHandler(enqueue("volume")); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())

	for {
		item, stop := queue.Get()
		if stop {
			return nil
		}
		if err := p.handle(ctx, item); err != nil {
			log.Printf("%s: %v", item, err)
			queue.AddRateLimited(item)
		} else {
			queue.Forget(item)
		}
		queue.Done(item)
	}
}

func (p *provisioner) handle(ctx context.Context, item string) error {
	if key, ok := strings.CutPrefix(item, "claim:"); ok {
		object, exists, err := p.claims.GetByKey(key)
		if err != nil || !exists {
			return err
		}
		return p.provision(ctx, object.(*corev1.PersistentVolumeClaim))
	}
	key := strings.TrimPrefix(item, "volume:")
	object, exists, err := p.volumes.GetByKey(key)
	if err != nil || !exists {
		return err
	}
	return p.reclaim(ctx, object.(*corev1.PersistentVolume))
}

// provision makes the volume of a claim that waits for one.
func (p *provisioner) provision(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil || claim.Spec.StorageClassName == nil ||
		claim.Annotations[annProvisioner] != provisionerName {
		return nil
	}
	object, exists, err := p.classes.GetByKey(*claim.Spec.StorageClassName)
	if err != nil {
		return err
	}
	if !exists {
		return fmt.Errorf("no StorageClass %s", *claim.Spec.StorageClassName)
	}
	class := object.(*storagev1.StorageClass)
	if *class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer && claim.Annotations[annSelectedNode] == "" {
		return nil
	}

	name := "pvc-" + string(claim.UID)
	size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	source, err := p.source(claim)
	if err != nil {
		return err
	}
	path, err := p.create(name, size.Value(), claim.Spec.VolumeMode, source)
	if err != nil {
		return err
	}
	volume := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{annProvisionedBy: provisionerName}},
		Spec: corev1.PersistentVolumeSpec{
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: size},
			AccessModes:                   claim.Spec.AccessModes,
			VolumeMode:                    claim.Spec.VolumeMode,
			StorageClassName:              class.Name,
			PersistentVolumeReclaimPolicy: *class.ReclaimPolicy,
			PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: path}},
			ClaimRef: &corev1.ObjectReference{APIVersion: "v1", Kind: "PersistentVolumeClaim",
				Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
					{Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{p.node}}}}},
			}},
		},
	}
	_, err = p.client.CoreV1().PersistentVolumes().Create(ctx, volume, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

// source returns the volume that a claim wants to be cloned, of those that are block devices: there is no other one.
func (p *provisioner) source(claim *corev1.PersistentVolumeClaim) (string, error) {
	from := claim.Spec.DataSource
	if from == nil {
		return "", nil
	}
	if from.Kind != "PersistentVolumeClaim" || claim.Spec.VolumeMode == nil || *claim.Spec.VolumeMode != corev1.PersistentVolumeBlock {
		return "", fmt.Errorf("claim %s: only claims that are block devices can be cloned", claim.Name)
	}
	object, exists, err := p.claims.GetByKey(claim.Namespace + "/" + from.Name)
	if err != nil {
		return "", err
	}
	if !exists || object.(*corev1.PersistentVolumeClaim).Spec.VolumeName == "" {
		return "", fmt.Errorf("claim %s has no volume that could be cloned", from.Name)
	}
	return object.(*corev1.PersistentVolumeClaim).Spec.VolumeName, nil
}

// reclaim removes a volume that its claim has left, and its data.
func (p *provisioner) reclaim(ctx context.Context, volume *corev1.PersistentVolume) error {
	if volume.Annotations[annProvisionedBy] != provisionerName || volume.Status.Phase != corev1.VolumeReleased ||
		volume.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
		return nil
	}
	p.mu.Lock()
	device := p.loops[volume.Name]
	p.mu.Unlock()
	if device != nil {
		device.Close() // a second time does no harm
		// The Pod object may be gone before the kubelet has let go of the device.
		backing := filepath.Join("/sys/block", filepath.Base(device.Name()), "loop/backing_file")
		if path, err := os.ReadFile(backing); err == nil && strings.Contains(string(path), volume.Name) {
			return fmt.Errorf("%s is still in use", device.Name())
		}
		p.mu.Lock()
		delete(p.loops, volume.Name)
		p.mu.Unlock()
	}
	if err := os.RemoveAll(filepath.Join(p.dir, volume.Name)); err != nil {
		return err
	}
	err := p.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// create makes the data of a volume and returns the path that a Pod's mount begins at.
func (p *provisioner) create(name string, size int64, mode *corev1.PersistentVolumeMode, source string) (string, error) {
	dir := filepath.Join(p.dir, name)
	if mode == nil || *mode == corev1.PersistentVolumeFilesystem {
		if err := os.MkdirAll(dir, 0o777); err != nil {
			return "", err
		}
		// A Pod of any user may write, as on the storage that people have (where fsGroup sees to it).
		return dir, os.Chmod(dir, 0o777)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if device := p.loops[name]; device != nil {
		return device.Name(), nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	file, err := os.OpenFile(filepath.Join(dir, "disk"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if source != "" {
		from, err := os.Open(filepath.Join(p.dir, source, "disk"))
		if err != nil {
			return "", fmt.Errorf("cloning %s: %w", source, err)
		}
		defer from.Close()
		if _, err := io.Copy(file, from); err != nil {
			return "", fmt.Errorf("cloning %s: %w", source, err)
		}
	}
	if err := file.Truncate(size); err != nil {
		return "", err
	}
	device, err := attach(file)
	if err != nil {
		return "", err
	}
	p.loops[name] = device
	return device.Name(), nil
}

// attach puts a file on a free loop device, which detaches itself when the last one who has it open is gone.
func attach(file *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("block volumes need loop devices: %w", err)
	}
	defer control.Close()
	for range 100 {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("asking for a free loop device: %w", err)
		}
		path := fmt.Sprintf("/dev/loop%d", number)
		device, err := os.OpenFile(path, os.O_RDWR, 0)
		if errors.Is(err, fs.ErrNotExist) {
			// A container's /dev does not follow the kernel's.
			if err = unix.Mknod(path, unix.S_IFBLK|0o660, int(unix.Mkdev(7, uint32(number)))); err == nil {
				device, err = os.OpenFile(path, os.O_RDWR, 0)
			}
		}
		if err != nil {
			return nil, err
		}
		config := unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		copy(config.Info.File_name[:63], file.Name())
		err = unix.IoctlLoopConfigure(int(device.Fd()), &config)
		if err == nil {
			return device, nil
		}
		device.Close()
		if !errors.Is(err, unix.EBUSY) { // someone else was faster
			return nil, fmt.Errorf("attaching %s to %s: %w", file.Name(), path, err)
		}
	}
	return nil, fmt.Errorf("attaching %s: every free loop device was taken by someone else", file.Name())
}
